#!/bin/sh
# Finds a Python that can make the virtual environment and hands over to tools/setup/bootstrap.py.
# PYTHON names one to use instead of looking; an environment that works is used as it is.
set -eu
cd "$(dirname "$0")/../.."

fail() {
    echo "setup: $*" >&2
    exit 1
}

[ "$(uname -s)" = Linux ] || fail "M* runs on Linux only, and this is $(uname -s)."
[ "$(uname -m)" = x86_64 ] || fail "M* runs on x86-64 only (its shared memory relies on that memory model), and this is $(uname -m)."

# usable PYTHON LOW HIGH: it runs, and LOW <= version < HIGH (minor versions of Python 3)
usable() {
    "$1" -c "import sys; sys.exit(not (3, $2) <= sys.version_info[:2] < (3, $3))" >/dev/null 2>&1
}

complete() {
    "$1" -c "import ensurepip, venv" >/dev/null 2>&1
}

python=""
bare=""
consider() {
    found=$(command -v "$1" 2>/dev/null) || return 0
    usable "$found" "$2" "$3" || return 0
    if complete "$found"; then python=$found; else bare=${bare:-$found}; fi
}

if [ -n "${PYTHON:-}" ]; then
    command -v "$PYTHON" >/dev/null 2>&1 || fail "PYTHON=$PYTHON cannot be run."
    usable "$PYTHON" 11 99 || fail "PYTHON=$PYTHON is $("$PYTHON" --version 2>&1), and M* needs Python 3.11 or newer."
    consider "$PYTHON" 11 99
elif usable "${VENV:-.venv}/bin/python" 11 99; then
    python=${VENV:-.venv}/bin/python
else
    # 3.11 to 3.13 are tested, a newer one is the last resort.
    for name in python3 python3.11 python3.12 python3.13 python; do
        [ -n "$python" ] || consider "$name" 11 14
    done
    for name in python3 python3.14 python3.15; do
        [ -n "$python" ] || consider "$name" 14 99
    done
fi

if [ -z "$python" ]; then
    [ -z "$bare" ] || fail "$bare has no venv module: install it (on Debian and Ubuntu the package python3-venv) and run this again."
    seen=$(python3 --version 2>/dev/null || echo "no python3 at all")
    fail "M* needs Python 3.11 or newer, and there is $seen: install one, or name it with PYTHON=/path/to/python3."
fi

exec "$python" -m tools.setup.bootstrap "$@"
