#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""api_check_exports_test.py CC SCRIPT MAP: scripts/check_exports accepts a library that keeps the
rules and refuses one for each rule that it breaks. CC makes the libraries, MAP is the version
script that the real one is linked with.
"""
import pathlib
import subprocess
import sys
import tempfile
import unittest

CC, SCRIPT, MAP = sys.argv[1:4]

GOOD = """
int ncclOne(void) { return 1; }
int pncclOne(void) __attribute__((alias("ncclOne")));
int ncclTwo(void) { return 2; }
int pncclTwo(void) __attribute__((alias("ncclTwo")));
int unisonoMore(void) { return 3; }
int hidden_by_the_map(void) { return 4; }
"""


class CheckExports(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.names = self.folder / "names.txt"
        self.names.write_text("# a comment\nncclOne\n\nncclTwo  # another\n")

    def build(self, source, *options, soname="libnccl.so.2", version_script=True,
              name="library.so"):
        library = self.folder / name
        options = list(options)
        if soname:
            options.append(f"-Wl,-soname,{soname}")
        if version_script:
            options.append(f"-Wl,--version-script={MAP}")
        subprocess.run([CC, "-x", "c", "-fPIC", "-shared", "-o", library, "-", "-x", "none",
                        "-Wl,--no-as-needed", *options], input=source, text=True, check=True)
        return library

    def check(self, library):
        done = subprocess.run([SCRIPT, library, self.names], capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr

    def assertRefused(self, library, *problems):
        status, text, _ = self.check(library)
        self.assertEqual(status, 1, text)
        listed = [line.split(": ", 1)[1] for line in text.splitlines()[:-1]]
        self.assertEqual(listed, list(problems))

    def test_accepts_what_keeps_the_rules(self):
        status, text, _ = self.check(self.build(GOOD, "-lm", "-lpthread"))
        self.assertEqual(status, 0, text)
        self.assertEqual(text, "exports: 2 names with their aliases, 0 problems\n")

    def test_names_missing(self):
        source = GOOD.replace("ncclTwo", "ncclTwice")
        self.assertRefused(self.build(source), "missing: ncclTwo", "missing: pncclTwo")

    def test_alias_missing(self):
        source = GOOD.replace('int pncclOne(void) __attribute__((alias("ncclOne")));', "")
        self.assertRefused(self.build(source), "missing: pncclOne")

    def test_alias_is_another_function(self):
        source = GOOD.replace('pncclOne(void) __attribute__((alias("ncclOne")));',
                              "pncclOne(void) { return 5; }")
        self.assertRefused(self.build(source), "not the same function: ncclOne and pncclOne")

    def test_name_is_data(self):
        source = GOOD.replace("int ncclOne(void) { return 1; }", "int ncclOne = 1;").replace(
            'int pncclOne(void) __attribute__((alias("ncclOne")));',
            'extern int pncclOne __attribute__((alias("ncclOne")));')
        self.assertRefused(self.build(source), "not a function: ncclOne",
                           "not a function: pncclOne")

    def test_more_exported(self):
        self.assertRefused(self.build(GOOD, version_script=False),
                           "exported but not ours: hidden_by_the_map")

    def test_soname(self):
        self.assertRefused(self.build(GOOD, soname="libnccl.so.3"),
                           "soname: libnccl.so.3 instead of libnccl.so.2")
        self.assertRefused(self.build(GOOD, soname=None),
                           "soname: none instead of libnccl.so.2")

    def test_needs_another_library(self):
        other = self.build("int other(void) { return 0; }", soname="libcuda.so.1",
                           version_script=False, name="other.so")
        self.assertRefused(self.build(GOOD, other), "needs: libcuda.so.1")

    def test_what_cannot_be_checked(self):
        status, _, text = self.check(self.folder / "absent.so")
        self.assertEqual(status, 2)
        self.assertIn("absent.so", text)
        self.names.write_text("# nothing\n")
        status, _, text = self.check(self.build(GOOD))
        self.assertEqual(status, 2)
        self.assertIn("lists no names", text)


unittest.main(argv=sys.argv[:1])
