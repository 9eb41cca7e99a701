# Storage of dom0 for images, beside steps.sh: a file system in memory, and devices that lose what was not flushed when their
# power is cut. Read by the tests that need it. Programs of which busybox has a lesser one are named by their place.

# image WORDS...: a job on images.
image() { /drop/tapline image "$@" || fail "tapline image $*"; }

# images MIB: a file system in memory for images, /images, which bears direct I/O and holes.
images() {
    ram_disks 1 "$1"
    file_system /dev/ram0 /images
}

# file_system DEVICE PLACE: in blocks of 4 KiB, which are what a discard gives back.
file_system() {
    /sbin/mkfs.ext4 -q -b 4096 "$1" || fail "mke2fs $1"
    mkdir -p "$2"
    mount -t ext4 -o noatime "$1" "$2" || fail "mount $2"
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
