#!/bin/sh
# Installs the packages of requirements.lock: deploy/install.sh PIP
# pip accepts only files whose hashes are in the lock file. The one exception are the packages that a build of torch
# with CUDA needs in addition.
set -eu
pip=$1
torch=$(grep -o '^torch==[^ ]*' requirements.lock)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# torch first and by itself: with hashes, pip would prefer a build from an index to one in a folder of wheels.
"$pip" download -q --no-deps --only-binary :all: -d "$work" "$torch"
awk '/^torch==/,!/\\$/' requirements.lock > "$work/torch.lock"
"$pip" install -q --require-hashes --no-deps --no-index --find-links "$work" -r "$work/torch.lock"

"$pip" install -q --require-hashes --no-deps --only-binary :all: -r requirements.lock
"$pip" install -q "$torch"  # the packages for CUDA, if this build needs them
