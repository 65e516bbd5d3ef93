#!/bin/sh
# Write lock.txt, gateway.txt and dev.txt anew: what pip resolves today from pyproject.toml in an empty environment.
#   PYTHON=python3.11 sh requirements/lock.sh
# torch and triton are pinned by hand below, since a release of torch asks for one release of triton.
set -eu
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"${PYTHON:-python3.11}" -m venv "$work/venv"
pip="$work/venv/bin/python -m pip --disable-pip-version-check"
printf 'torch==2.13.0\ntriton==3.7.1; platform_system == "Linux"\n' >"$work/pins"

async_timeout="async-timeout==5.0.1; python_full_version < '3.11.3'" # of redis

names() { # names PYTHON-EXPRESSION: the requirements that it yields from pyproject.toml's project and its groups
    "$work/venv/bin/python" -c "import tomllib; toml = tomllib.load(open('pyproject.toml', 'rb')); project, groups = toml['project'], toml['dependency-groups']; print('\n'.join($1))"
}

frozen() { # without the build tag that some builds of torch carry (2.13.0+cpu)
    $pip freeze --all --exclude pip | sed -e 's/+cpu$//' -e 's/^triton==.*/&; platform_system == "Linux"/'
}

names "project['dependencies']" >"$work/runtime"
$pip install -c "$work/pins" -r "$work/runtime"
{
    echo "# What runs Baton, with everything that it drags in. Made by lock.sh; do not edit."
    frozen
    echo "$async_timeout"
} >requirements/lock.txt

"${PYTHON:-python3.11}" -m venv "$work/gateway"
names "groups['gateway']" >"$work/gateway-names"
"$work/gateway/bin/python" -m pip --disable-pip-version-check install -c requirements/lock.txt -r "$work/gateway-names"
{
    echo "# What a gateway runs on: the part of lock.txt that the dependency group gateway asks for. Made by lock.sh; do not edit."
    "$work/gateway/bin/python" -m pip --disable-pip-version-check freeze
    echo "$async_timeout"
} >requirements/gateway.txt

names "project['optional-dependencies']['dev'] + ['editables>=0.6', *tomllib.load(open('pyproject.toml', 'rb'))['build-system']['requires']]" >"$work/dev"
$pip install -c "$work/pins" -c requirements/lock.txt -r "$work/dev"
frozen >"$work/all"
{
    echo "# What builds, checks and tests Baton, beside lock.txt. Made by lock.sh; do not edit."
    echo "-c lock.txt"
    grep -v -x -F -f requirements/lock.txt "$work/all"
} >requirements/dev.txt
