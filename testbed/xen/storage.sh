# Storage of dom0 for images, beside steps.sh: jobs on images, chains of them, and devices that lose what was not flushed when their
# power is cut. Read by the tests that need it. Programs of which busybox has a lesser one are named by their place.

# image WORDS...: a job on images.
image() { /drop/tapline image "$@" || fail "tapline image $*"; }

# sound IMAGE…: a check finds nothing wrong but space that nothing refers to (5), which whoever was killed may leave.
sound() { /drop/tapline image check "$@" || [ $? -eq 5 ] || fail "tapline image check $*"; }

# verified_chain FORMAT: a guest's verified load on a chain of two images, /images/disk.FORMAT on base.FORMAT: it reads what the
# base holds, the base stays, and the chain is sound and has what the guest wrote.
verified_chain() {
    leaf=$1:/images/disk.$1
    base=$1:/images/base.$1
    images 64
    fill /tmp/content 16
    before=$(hash_of /tmp/content)
    image convert raw:/tmp/content "$base" --cache writeback
    image create "$leaf" --parent "$base"
    base_before=$(hash_of "${base#*:}")
    case $backend in
    # QEMU finds the parent by itself.
    qdisk) guest a attach "" "$leaf" ;;
    tapline) guest a attach "" "$leaf,$base" ;;
    esac
    wait_end a 300
    expect "the disk's content as the guest reads it" "$(said a before)" "$before"
    [ "$(said a after)" != "$before" ] || fail "the guest wrote nothing"
    expect "the base after the guest" "$(hash_of "${base#*:}")" "$base_before"
    sound "$leaf" --parent "$base"
    image convert "$leaf" --parent "$base" raw:/images/flat.raw
    expect "the disk's content after the guest" "$(hash_of /images/flat.raw)" "$(said a after)"
    e2fsck -f -n /images/flat.raw || fail "e2fsck in dom0"
}

# taken FILE: the bytes that it takes on its file system.
taken() { echo $(($(stat -c '%b * %B' "$1"))); }

# looped FILE: a device over a file that passes discards on; its name.
looped() { /sbin/losetup -f --show --direct-io=on "$1" || fail "losetup $1"; }

null_disks=/sys/kernel/config/nullb

# null_disk NAME MIB SECTOR [CACHE]: /dev/NAME in memory, with sectors of so many bytes and a volatile cache of so many MiB. Names
# are nullb0, nullb1, and so on, in this order: those of the kernel.
null_disk() {
    [ -d $null_disks ] || insmod $modules/null_blk.ko nr_devices=0 || fail "null_blk"
    [ -d $null_disks ] || mount -t configfs configfs /sys/kernel/config || fail "configfs"
    mkdir $null_disks/"$1" || fail "null disk $1"
    for setting in memory_backed=1 size="$2" blocksize="$3" cache_size="${4:-0}"; do
        echo "${setting#*=}" >$null_disks/"$1"/"${setting%%=*}" || fail "$setting of $1"
    done
    give_power "$1"
}

# give_power NAME...: all of them that have none, in their order.
give_power() {
    for each in "$@"; do
        echo 1 >$null_disks/"$each"/power || fail "power of $each"
        [ -b /dev/"$each" ] || fail "no /dev/$each"
    done
}

# cut_power NAME...: the devices are gone at once, and what was in their caches for ever. Before that the kernel syncs a file system
# that is mounted from one, but not one that a loop device between keeps out of its sight.
cut_power() {
    for each in "$@"; do echo 0 >$null_disks/"$each"/power || fail "cut the power of $each"; done
}

# bootable FILE JOB: a disk from which a guest's firmware boots, by a boot loader, the guests' kernel and initramfs with the job that is in
# that directory (`initrd_of`). It has no partitions; the guest finds a note on it, and how often it was booted.
bootable() {
    dd if=/dev/zero of="$1" bs=1M count=40 2>/dev/null
    loop=$(looped "$1") || fail "loop"
    # Only what the boot loader can read.
    file_system "$loop" /mnt -O ^64bit,^metadata_csum,^metadata_csum_seed,^orphan_file
    mkdir /mnt/boot
    extlinux --install /mnt/boot >/tmp/extlinux 2>&1 || { cat /tmp/extlinux; fail "extlinux"; }
    # The firmware reads sector by sector, each of which is a long way round through Xen and QEMU.
    mkdir /tmp/thin
    (cd /tmp/thin && cpio -idm </guest/initrd 2>/dev/null && cp -r "$2" . && rm -f tools/fio tools/mke2fs tools/e2fsck \
        && find . | cpio -o -H newc 2>/dev/null | gzip -1) >/mnt/boot/initrd || fail "initrd"
    rm -r /tmp/thin
    cp /guest/vmlinuz /mnt/boot/ || fail "copy"
    ls -l /mnt/boot
    echo "beside the kernel" >/mnt/note
    echo 0 >/mnt/boots
    printf '%s\n' "serial 0 115200" "default guest" "label guest" "linux vmlinuz" "initrd initrd" "append $(guest_words)" \
        >/mnt/boot/extlinux.conf
    umount /mnt && /sbin/losetup -d "$loop" || fail "unmount"
}

# boots_by_firmware NAME DISKS LINE...: the configuration of an HVM guest with these disks of xl's, and more lines, in /tmp/config. What
# its firmware and its boot loader say goes to /out/serial.
boots_by_firmware() {
    : >"$(console_of "$1")"
    printf '%s\n' "name='$1'" "type='hvm'" "memory=320" "tsc_mode='native'" "vga='none'" "boot='c'" "serial='file:/out/serial'" \
        "on_poweroff='destroy'" "on_crash='destroy'" "disk=[$2]" >/tmp/config
    shift 2
    [ $# = 0 ] || printf '%s\n' "$@" >>/tmp/config
}
