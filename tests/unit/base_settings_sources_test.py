#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every member of Settings is read by some source, and no source but src/base/settings.cpp reads the
environment."""
import pathlib
import re
import sys

SRC = pathlib.Path(__file__).resolve().parent.parent.parent / "src"
OWNERS = {SRC / "base/settings.h", SRC / "base/settings.cpp"}


def members():
    text = (SRC / "base/settings.h").read_text()
    body = re.search(r"^struct Settings \{(.*?)^\};", text, re.S | re.M).group(1)
    found = re.findall(r"^  (?:bool|int64_t|std::string) (\w+)(?: = [^;]+)?;", body, re.M)
    assert "backend" in found and "crossNic" in found, found
    return found


def main():
    files = sorted(p for p in SRC.rglob("*") if p.suffix in (".h", ".cpp", ".cu") and p not in OWNERS)
    sources = {path: path.read_text() for path in files}
    # channelBounds() is how the others get at these.
    indirect = {"minChannels", "maxChannels", "minCtas", "maxCtas"}
    problems = []
    everything = "\n".join(sources.values())
    for member in members():
        user = "channelBounds(" if member in indirect else None
        pattern = re.escape(user) if user else rf"[sS]ettings(?:_|\(\))?\.{member}\b"
        if not re.search(pattern, everything):
            problems.append(f"Settings::{member} is read by no source")
    for path, text in sources.items():
        for number, line in enumerate(text.splitlines(), 1):
            if re.search(r"\b(secure_)?getenv\s*\(|\benviron\b", line):
                problems.append(f"{path}:{number} reads the environment")
    for problem in problems:
        print(problem)
    return 1 if problems else 0


sys.exit(main())
