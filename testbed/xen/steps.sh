# What a test in dom0 is made of. Read by run.sh before the test; a step that fails ends the test with 1.
#
# A guest's disk is a RAM disk of dom0, so that what it holds can be looked at from outside. Guests are named a, b; the first
# disk of a guest is xvda, and so on.

modules=/modules

fail() {
    echo "FAILED: $*"
    finish 1
}

# finish [CODE]: takes down what is left, for the logs' sake, and ends the test.
finish() {
    trap - EXIT
    exit "${1:-0}"
}

# ram_disks COUNT MIB: /dev/ram0, /dev/ram1, …, without content.
ram_disks() {
    insmod $modules/brd.ko rd_nr="$1" rd_size=$(($2 * 1024)) || fail "brd"
}

# file_system DEVICE PLACE [OPTION...]: in blocks of 4 KiB, which are what a discard gives back. It bears direct I/O and holes.
file_system() {
    device=$1
    place=$2
    shift 2
    /sbin/mkfs.ext4 -q -b 4096 "$@" "$device" || fail "mke2fs $device"
    mkdir -p "$place"
    mount -t ext4 -o noatime "$device" "$place" || fail "mount $place"
}

# images MIB: a file system in memory for images, /images.
images() {
    ram_disks 1 "$1"
    file_system /dev/ram0 /images -O ^has_journal
}

# fill DISK MIB: random content at its beginning.
fill() { dd if=/dev/urandom of="$1" bs=1M count="$2" conv=notrunc 2>/dev/null || fail "fill $1"; }

# hash_of FILE: of all of it.
hash_of() {
    set -- $(md5sum "$1")
    echo "$1"
}

# xvd NUMBER: its name in a guest; 0 is xvda.
xvd() { printf "xvd\\$(printf %o $((97 + $1)))"; }

# A disk is [WORD+WORD…:]PATH[,FORMAT:PATH…], with the parents of an image behind it, from the top down. The words, in any order:
# a backend, without which it is $backend; a format, without which it is raw; `r` for a disk that the guest may only read;
# a way to its pages; `polling-off`, `polling-adaptive` or `polling-on` for our backend; `writeback` for files that our
# backend reaches through the page cache. So /dev/ram0, r:/dev/ram0, qdisk+qcow2:/images/disk.qcow2,
# vhd:/images/child.vhd,vhd:/images/base.vhd.

# word_of DISK DEFAULT WORD...: the one of these words that the disk has.
word_of() {
    case $1 in
    /*) words= ;;
    *) words="+${1%%:*}+" ;;
    esac
    found=$2
    shift 2
    for each in "$@"; do
        case $words in
        *+"$each"+*) found=$each ;;
        esac
    done
    echo "$found"
}

backend_of() { word_of "$1" "$backend" blkback qdisk tapline; }
format_of() { word_of "$1" raw raw vhd qcow2; }
mode_of() { word_of "$1" w r; }
cache_of() { word_of "$1" none writeback; }
grants_of() { word_of "$1" auto copy map persistent; }
polling_of() { word_of "$1" polling-asis polling-off polling-adaptive polling-on; }

path_of() {
    path=${1%%,*}
    echo "/${path#*/}"
}

# parents_of DISK: as words.
parents_of() {
    case $1 in
    *,*) echo "${1#*,}" | tr , ' ' ;;
    esac
}

# spec DISK NAME: how a toolstack names a disk of the peers' backends.
spec() {
    case $(backend_of "$1") in
    blkback) echo "phy:$(path_of "$1"),$2,$(mode_of "$1")" ;;
    qdisk) echo "format=$(format_of "$1"),vdev=$2,access=$(mode_of "$1"),backendtype=qdisk,target=$(path_of "$1")" ;;
    esac
}

# serve GUEST DISK NAME: our own backend, until the guest or the disk goes.
serve() {
    # Parents are words.
    # shellcheck disable=SC2046
    /drop/tapline xen attach "$(xl domid "$1")" "$(format_of "$2"):$(path_of "$2")" $(parents_of "$2") --vdev "$3" \
        --mode "$(mode_of "$2")" --cache "$(cache_of "$2")" --grants "$(grants_of "$2")" --log "/out/serve-$1-$3.log" || fail "tapline xen attach $3"
    # 50 us, as it is by default, are the time of some 200,000 instructions of a processor, and here of 12,500.
    polling=$(polling_of "$2")
    [ "$polling" = polling-asis ] || control "$1" "$3" polling --mode "${polling#polling-}" --max 1000 || fail "polling of $3"
}

# control GUEST NAME VERB...: asks our backend's disk for something.
control() {
    socket=/run/tapline/xen-$(xl domid "$1")-$2.sock
    shift 2
    /drop/tapline disk "$socket" "$@"
}

# guest_words: what a guest's kernel is told.
guest_words() { echo "console=hvc0 quiet panic=-1 mitigations=off norandmaps ${kernel_words:-}"; }

# initrd_of NAME JOB VARIABLES: $place/initrd, with a job in it. VARIABLES are assignments for the job.
initrd_of() {
    place=/tmp/guest-$1
    rm -rf "$place"
    mkdir -p "$place/job"
    cp "/drop/jobs/$2.sh" "$place/job/job.sh"
    [ ! -e /drop/mark ] || cp /drop/mark "$place/job/"
    for each in ${beside_job:-}; do cp -rL "$each" "$place/job/" || fail "$each beside a job"; done
    printf 'disk=/dev/xvda\n%s\n' "$3" >"$place/job/parameters"
    # The kernel unpacks every archive that it finds.
    (cat /guest/initrd && cd "$place" && find job | cpio -o -H newc 2>/dev/null) >"$place/initrd" || fail "initrd of $1"
}

# guest NAME JOB VARIABLES DISK...: a guest that runs a job on the disks.
guest() {
    name=$1
    initrd_of "$1" "$2" "$3"
    shift 3
    : >"/var/log/xen/console/guest-$name.log"
    {
        echo "name='$name'"
        echo "type='$guest_type'"
        echo "memory=${guest_memory:-320}"
        echo "vcpus=1"
        [ -z "${guest_cpu:-}" ] || echo "cpus='$guest_cpu'"
        # Otherwise Xen takes apart each look at the clock, and translation says RDTSC where it was RDTSCP.
        echo "tsc_mode='native'"
        echo "kernel='/guest/vmlinux'"
        echo "ramdisk='$place/initrd'"
        echo "extra='$(guest_words)'"
        echo "on_poweroff='destroy'"
        echo "on_reboot='destroy'"
        echo "on_crash='destroy'"
        at_start "$@"
    } >"$place/config"
    # Paused, so that a disk of ours is there when the guest looks.
    xl create -q -p "$place/config" || fail "xl create $name"
    number=0
    for each in "$@"; do
        [ "$(backend_of "$each")" != tapline ] || serve "$name" "$each" "$(xvd $number)"
        number=$((number + 1))
    done
    xl unpause "$name"
}

# at_start DISK...: the line about disks that the toolstack itself attaches.
at_start() {
    number=0
    list=
    for each in "$@"; do
        [ "$(backend_of "$each")" = tapline ] || list="$list'$(spec "$each" "$(xvd $number)")',"
        number=$((number + 1))
    done
    echo "disk=[$list]"
}

# plug GUEST DISK NAME: while it runs.
plug() {
    case $(backend_of "$2") in
    tapline) serve "$@" ;;
    *) xl block-attach "$1" "$(spec "$2" "$3")" || fail "block-attach $3" ;;
    esac
}

# unplug GUEST NAME
unplug() {
    case $backend in
    tapline) /drop/tapline xen detach "$1" "$2" || fail "tapline xen detach $2" ;;
    *) xl block-detach "$1" "$2" || fail "block-detach $2" ;;
    esac
}

console_of() { echo "/var/log/xen/console/guest-$1.log"; }

# wait_said GUEST WORDS SECONDS: until it has said exactly so. Seldom looked at: one CPU serves all.
wait_said() {
    left=$3
    until grep -aq "TAPLINE $2" "$(console_of "$1")"; do
        # A guest that has panicked says nothing more.
        if grep -aqe "TAPLINE fail=" -e "Kernel panic - not syncing" "$(console_of "$1")" || [ "$left" -le 0 ]; then
            tail -n 20 "$(console_of "$1")"
            fail "guest $1 does not say $2 within $3 s"
        fi
        left=$((left - ${nap:-1}))
        sleep "${nap:-1}"
    done
}

# answer GUEST [WORD]: a line for its job: what that has asked for (`ask`) is done, or a word that it waits for.
answer() {
    console=$(xenstore-read "/local/domain/$(xl domid "$1")/console/tty") || fail "no console of $1"
    echo "${2:-}" >"$console"
}

# said GUEST KEY: the last value. A program's progress may stand before it on the line.
said() { tr '\r' '\n' <"$(console_of "$1")" | sed -n "s/^TAPLINE $2=//p" | tail -n 1; }

# front_end WORDS...: our own front end, against our backend over /dev/ram0 and /dev/ram1; its tests one after the other.
front_end() {
    # Xen's private programs, for what Xen itself has to say; and pages for front ends, all at once.
    PATH="$PATH:$(echo /usr/lib/xen-4.*/bin)"
    echo 16384 >/sys/module/xen_gntalloc/parameters/limit || fail "the limit of gntalloc"
    TAPLINE_DISK=/drop/tapline-disk TAPLINE_LOGS=/out /drop/xen_hostile --test-threads=1 --nocapture "$@" \
        || fail "the front end of our own"
}

# expect WHAT IS SHOULD
expect() { [ "$2" = "$3" ] || fail "$1 is '$2' and should be '$3'"; }

# wait_end GUEST SECONDS: its job has succeeded and the guest is gone, with all of its disks' nodes.
wait_end() {
    wait_said "$1" end=ok "$2"
    wait_gone "$1" 60
}

# wait_gone GUEST SECONDS
wait_gone() {
    left=$2
    while xl domid "$1" >/dev/null 2>&1; do
        [ "$left" -gt 0 ] || fail "guest $1 does not go"
        left=$((left - 1))
        sleep 1
    done
    no_nodes "$1"
}

# no_nodes GUEST: no disk of a guest that is gone is left in the store.
no_nodes() {
    left=20
    while nodes=$(xenstore-ls /local/domain/0/backend 2>/dev/null | grep -c 'frontend = "/local/domain/[1-9]'); [ "$nodes" -gt "${guests_left:-0}" ]; do
        [ "$left" -gt 0 ] || { xenstore-ls /local/domain/0/backend; fail "disks of guest $1 are left in the store"; }
        left=$((left - 1))
        sleep 1
    done
}
