#!/usr/bin/env bash
# Builds the container image: images/container/build.sh WHEEL [TAG]
#
# Needs root, mmdebstrap, buildah, and .venv (make setup), whose pip fetches the wheels of requirements.lock; the build
# itself reaches no network. What takes long is kept under build/container.
set -euo pipefail
cd "$(dirname "$0")/../.."

wheel=${1:?usage: images/container/build.sh WHEEL [TAG]}
tag=${2:-zccp:$(basename "$wheel" | cut -d- -f2)}
context=build/container
mkdir -p "$context/wheels"
rm -f "$context"/zccp-*.whl
cp "$wheel" "$context/"
cp requirements.lock images/container/Containerfile "$context/"

[[ -f $context/rootfs.tar ]] || images/rootfs.sh "$context/rootfs.tar"
.venv/bin/python images/wheels.py requirements.lock "$context/wheels"
buildah build --isolation chroot --layers=false --tag "$tag" --file "$context/Containerfile" "$context"
