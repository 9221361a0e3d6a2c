#!/usr/bin/env bash
# Makes a root file system of Debian as a tar archive: images/rootfs.sh OUT.tar [PACKAGE...]
#
# Packages come from where apt of this machine has Debian's from, so no mirror is named here. Two runs with one
# SOURCE_DATE_EPOCH and the same packages in the mirror give the same bytes. Needs root and mmdebstrap.
set -euo pipefail

suite=${ZCCP_SUITE:-bookworm}
out=${1:?usage: images/rootfs.sh OUT.tar [PACKAGE...]}
shift
packages=(python3 python3-venv ca-certificates nginx-light "$@")
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git -C "$(dirname "$0")" log -1 --format=%ct)}

# shellcheck disable=SC2016 # these are apt's own placeholders
sources=$(apt-get indextargets --format 'deb $(REPO_URI) $(RELEASE) $(COMPONENT)' 'Created-By: Packages' \
    'Origin: Debian' | awk -v suite="$suite" '$3 ~ "^" suite && $4 == "main"' | sort -u)
if [[ -z $sources ]]; then
    echo "rootfs.sh: apt of this machine has no $suite; add it to its sources, or set ZCCP_SUITE" >&2
    exit 2
fi

without=()
for name in doc info lintian linda locale man; do
    without+=("--dpkgopt=path-exclude=/usr/share/$name/*")
done

# What differs from run to run is removed: logs, caches, the id of the machine.
# shellcheck disable=SC2016 # $1 is the folder that mmdebstrap makes
printf '%s\n' "$sources" | mmdebstrap --quiet --variant=minbase --include="$(IFS=,; echo "${packages[*]}")" \
    "${without[@]}" \
    --customize-hook='rm -rf "$1"/var/log/* "$1"/var/cache/ldconfig/aux-cache "$1"/var/lib/apt/lists/*' \
    --customize-hook='rm -f "$1"/etc/resolv.conf "$1"/etc/hostname; : > "$1"/etc/machine-id' \
    --customize-hook='rm -f "$1"/etc/apt/sources.list' \
    --format=tar "$suite" "$out" -
