#!/bin/sh
# make_venv.sh FOLDER PYTHON...: make a virtual environment with the pinned packages and this project, editable.
# The first PYTHON that is 3.11 or newer is used. Safe to run again, also after it was interrupted.
set -eu
folder=$1
shift

fail() {
    echo "error: $*" >&2
    exit 1
}

python=
for candidate in "$@"; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        python=$candidate
        break
    fi
done
[ -n "$python" ] || fail "Baton needs Python 3.11 or newer; none of these is: $* (python3 here: $(python3 --version 2>&1 || true)).
Install one, or name it: make setup PYTHON=/path/to/python3.11"

echo "setup 1/3: virtual environment in $folder with $("$python" --version)"
"$python" -m venv "$folder" ||
    fail "the virtual environment could not be made; on Debian and Ubuntu: apt-get install python3-venv"

echo "setup 2/3: pinned packages (about 2 GB on disk with torch; a few minutes the first time)"
pip="$folder/bin/python -m pip --disable-pip-version-check --no-input"
$pip install -r requirements/lock.txt -r requirements/dev.txt

echo "setup 3/3: this project, editable"
$pip install --quiet --no-build-isolation --no-deps --editable .
$pip check
