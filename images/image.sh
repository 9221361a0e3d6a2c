#!/usr/bin/env bash
# Makes a bootable disk image of a host: images/image.sh OUT.raw (make image)
#
# Debian with systemd, sshd, nginx, Redis and a firewall, started by UEFI through systemd-boot and a unified kernel image.
# ansible/site.yml makes an appliance of it. Packages come from where apt of this machine has Debian's from. Tools come
# from a tree of a newer Debian that is made first, so this machine needs root, mmdebstrap and its kernel's mounts alone.
# Times, ids and seeds come from SOURCE_DATE_EPOCH and from this file, so that only the packages of the mirror change it.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)

out=$(realpath -m "${1:?usage: images/image.sh OUT.raw}")
suite=${ZCCP_SUITE:-bookworm}
tool_suite=${ZCCP_TOOL_SUITE:-trixie}
kernel_package=${ZCCP_KERNEL:-linux-image-cloud-amd64}
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git -C "$here" log -1 --format=%ct)}
seed=6f1c1d3e-0000-4000-8000-000000000001 # of the ids of partitions and file systems, so that they are the same each time
hash_seed=6f1c1d3e-0000-4000-8000-000000000002

kept=$(dirname "$out")/kept
work=$(dirname "$out")/work
mkdir -p "$kept"
rm -rf "$work"
mkdir -p "$work/efi/EFI/BOOT" "$work/efi/EFI/Linux" "$work/efi/loader"

packages=(
    "$kernel_package" initramfs-tools systemd systemd-sysv systemd-resolved udev dbus libpam-systemd openssh-server
    python3 python3-venv python3-apt sudo openssl nginx-light redis-server nftables netbase iproute2 procps ca-certificates curl
    prometheus-node-exporter
)
tool_packages=(systemd-repart systemd-ukify systemd-boot-efi mtools dosfstools e2fsprogs python3-pefile)
without=()
for name in doc info lintian linda locale man; do
    without+=("--dpkgopt=path-exclude=/usr/share/$name/*")
done

sources() { # where apt of this machine has a suite of Debian from
    # shellcheck disable=SC2016 # these are apt's own placeholders
    apt-get indextargets --format 'deb $(REPO_URI) $(RELEASE) $(COMPONENT)' 'Created-By: Packages' 'Origin: Debian' \
        | awk '$4 == "main"' | sed -E "s/ [a-z]+(-security|-updates)? main$/ $1\1 main/" | sort -u
}

join() { local IFS=,; echo "$*"; }

if [[ ! -d $kept/tools/usr ]]; then
    rm -rf "$kept/tools"
    sources "$tool_suite" | mmdebstrap --quiet --variant=apt --mode=root --include="$(join "${tool_packages[@]}")" \
        "${without[@]}" "$tool_suite" "$kept/tools" -
fi

# What differs from run to run is removed: keys, the id of the machine, logs and caches.
# shellcheck disable=SC2016 # $1 is the folder that mmdebstrap makes
sources "$suite" | mmdebstrap --quiet --variant=apt --mode=root --include="$(join "${packages[@]}")" "${without[@]}" \
    --essential-hook='mkdir -p "$1/etc/initramfs-tools/conf.d"' \
    --essential-hook='echo MODULES=most > "$1/etc/initramfs-tools/conf.d/modules"' \
    --customize-hook="copy-in $here/host/overlay/etc /" \
    --customize-hook='chroot "$1" systemctl enable systemd-networkd ssh-hostkeys ssh nftables nginx redis-server' \
    --customize-hook='rm -f "$1"/etc/ssh/ssh_host_* "$1"/var/lib/dbus/machine-id "$1"/etc/resolv.conf' \
    --customize-hook='ln -s ../run/systemd/resolve/stub-resolv.conf "$1"/etc/resolv.conf' \
    --customize-hook='echo zccp > "$1"/etc/hostname; : > "$1"/etc/machine-id; rm -f "$1"/etc/apt/sources.list' \
    --customize-hook='rm -rf "$1"/var/log/* "$1"/var/cache/ldconfig/aux-cache "$1"/var/lib/apt/lists/*' \
    --customize-hook='chown -R root:root "$1"/etc/repart.d "$1"/etc/fstab "$1"/etc/nftables.conf "$1"/etc/systemd' \
    "$suite" "$work/root" -
mkdir -p "$work/root/var/log/nginx" "$work/root/var/log/redis"
chroot "$work/root" chown www-data:adm /var/log/nginx
chroot "$work/root" chown redis:adm /var/log/redis
(cd "$work/root" && dpkg-query --admindir=var/lib/dpkg --show) > "${out%.raw}.packages"

printf 'timeout 0\n' > "$work/efi/loader/loader.conf"
cp -r "$here/host/repart.d" "$work/repart.d"
cp "$kept/tools/usr/lib/systemd/boot/efi/systemd-bootx64.efi" "$work/efi/EFI/BOOT/BOOTX64.EFI"
kernel=$(basename "$work/root/boot/"vmlinuz-*)
kernel=${kernel#vmlinuz-}
mkdir -p "$kept/tools$work"
rm -f "$out"

# A mount namespace of its own, so that nothing stays mounted whatever happens.
unshare --mount --propagation private bash -euo pipefail -s <<INSIDE
tools=$kept/tools
mount -t proc proc "\$tools/proc"
mount --rbind /dev "\$tools/dev"
mount -t sysfs sysfs "\$tools/sys"
mount --bind "$work" "\$tools$work"
chroot "\$tools" ukify build --linux="$work/root/boot/vmlinuz-$kernel" --initrd="$work/root/boot/initrd.img-$kernel" \
    --uname="$kernel" --os-release="@$work/root/usr/lib/os-release" --output="$work/efi/EFI/Linux/zccp.efi" \
    --cmdline='root=LABEL=root rw console=tty0 console=ttyS0 panic=10'
find "$work/root" "$work/efi" -newermt "@$SOURCE_DATE_EPOCH" -print0 | xargs -0 -r touch -h -d "@$SOURCE_DATE_EPOCH"
export SOURCE_DATE_EPOCH=$SOURCE_DATE_EPOCH SYSTEMD_REPART_MKFS_OPTIONS_EXT4="-E hash_seed=$hash_seed"
chroot "\$tools" systemd-repart --sector-size=512 --definitions="$work/repart.d" --root="$work" --empty=create \
    --size=2G --offline=yes --seed=$seed --dry-run=no "$work/image.raw"
INSIDE
mv "$work/image.raw" "$out"
rm -rf "$work"
(cd "$(dirname "$out")" && sha256sum "$(basename "$out")" > "$(basename "$out").sha256")
