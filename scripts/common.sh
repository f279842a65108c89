# SPDX-License-Identifier: Apache-2.0
# Functions of the other scripts in this folder. Sourced, not run.
# shellcheck shell=bash disable=SC2034

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
jobs=${JOBS:-$(nproc)}

say() { printf '%s\n' "$*"; }
die() {
  printf '%s: %s\n' "${0##*/}" "$*" >&2
  exit 1
}
have() { command -v "$1" >/dev/null 2>&1; }

# Prints the leading comment of the calling script.
usage() { sed -n '2,/^[^#]/{/SPDX-License-Identifier/d;s/^# \{0,1\}//p}' "$0"; }

# nvcc of a CUDA toolkit 13 or later: $CUDACXX, PATH, then the usual folder. Prints nothing if none.
find_nvcc() {
  local nvcc release
  for nvcc in "${CUDACXX:-}" "$(command -v nvcc || true)" /usr/local/cuda/bin/nvcc; do
    if [ -z "$nvcc" ] || [ ! -x "$nvcc" ]; then continue; fi
    release=$("$nvcc" --version | sed -n 's/.*release \([0-9]*\)\..*/\1/p')
    if [ "${release:-0}" -ge 13 ]; then
      printf '%s\n' "$nvcc"
      return
    fi
  done
}

# g++ 12's ThreadSanitizer cannot place its shadow memory under the widest address randomisation of
# newer kernels; this prefix turns the randomisation off for what it starts.
tsan_prefix() {
  local bits
  bits=$(cat /proc/sys/vm/mmap_rnd_bits 2>/dev/null || echo 0)
  if [ "$bits" -gt 28 ] && setarch "$(uname -m)" -R true 2>/dev/null; then
    printf 'setarch %s -R' "$(uname -m)"
  fi
}
