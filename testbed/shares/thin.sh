# A disk on a thin volume whose pool is full: the guest is told ENOSPC or waits, and nothing is lost. The pool is made
# as LVM makes one, and gives errors when it is full (error_if_no_space).

export DM_DISABLE_UDEV=1
# Sectors of the pool's metadata, of its data at first and later, and of the volume; its blocks.
META=16384 SMALL=98304 LARGE=786432 VOLUME=524288 BLOCK=128
thin=/dev/mapper/thin

server_words() {
    echo "--- pool"
    dmsetup status
    cat /tmp/serve.log
}

# pool SECTORS: the tables of a pool with so much room.
data_table() { echo "0 $1 linear /dev/vdc $META"; }
pool_table() { echo "0 $1 thin-pool /dev/mapper/meta /dev/mapper/data $BLOCK 0 1 error_if_no_space"; }

make_volume() {
    ok dmsetup create meta --table "0 $META linear /dev/vdc 0"
    ok busybox dd if=/dev/zero of=/dev/mapper/meta bs=4096 count=1 conv=fsync
    ok dmsetup create data --table "$(data_table $SMALL)"
    ok dmsetup create pool --table "$(pool_table $SMALL)"
    ok dmsetup message pool 0 "create_thin 0"
    ok dmsetup create thin --table "0 $VOLUME thin /dev/mapper/pool 0"
}
remove_volume() { for name in thin pool data meta; do ok dmsetup remove $name; done; }

extend_pool() {
    ok dmsetup suspend pool
    ok dmsetup suspend data
    ok dmsetup reload data --table "$(data_table $LARGE)"
    ok dmsetup resume data
    ok dmsetup reload pool --table "$(pool_table $LARGE)"
    ok dmsetup resume pool
}
pool_is_full() { dmsetup status pool | grep -q out_of_data_space; }

# serve FORMAT WORDS...: the volume, or an image on it.
serve() {
    local format=$1
    shift
    rm -f /tmp/nbd.sock /tmp/control.sock
    tapline-disk serve "$format:$thin" --nbd /tmp/nbd.sock --control /tmp/control.sock "$@" >>/tmp/serve.log 2>&1 &
    serving=$!
    within 60 "the disk is served" [ -S /tmp/nbd.sock ]
}
stop() {
    kill $serving
    wait $serving || fail "the disk did not end well"
}

# guest COMMAND...: of qemu-io, in order; `reading` is its flag for a disk that may only be read.
reading=
guest() {
    local words=()
    for command in "$@"; do words+=(-c "$command"); done
    qemu-io $reading -f raw "${words[@]}" "nbd+unix:///?socket=/tmp/nbd.sock"
}
# shows PATTERN AT LENGTH, in MiB.
shows() {
    ok guest "read -P $1 $2M $3M"
    ! grep -qi "verification failed\|error" /tmp/said || fail "the disk shows something else at $2 MiB: $(said)"
}

# image FORMAT: an empty one on the volume. A VHD on a device has its footer in the last sector.
image() {
    case $1 in
    qcow2) ok qemu-img create -q -f qcow2 $thin 200M ;;
    vhd)
        ok tapline-disk image create vhd:/tmp/new.vhd --size 200M
        ok busybox dd if=/tmp/new.vhd of=$thin bs=4096 conv=fsync
        ok busybox dd if=/tmp/new.vhd of=$thin bs=512 count=1 seek=$((VOLUME - 1)) conv=fsync
        ;;
    esac
}

# disk FORMAT: fills the pool under it.
disk() {
    local format=$1 writer
    tell "$format on a thin volume"
    make_volume
    image "$format"
    serve "$format"
    ok guest "write -P 1 0 24M" "flush"
    guest "write -P 2 24M 24M" "write -P 2 48M 24M" "flush" >/tmp/said 2>&1
    grep -q "No space left on device" /tmp/said || fail "the guest was not told ENOSPC: $(said)"
    ! grep -q "Input/output error" /tmp/said || fail "the guest was told EIO: $(said)"
    within 30 "the pool is full" pool_is_full
    shows 1 0 24
    stop
    held "$format: a full pool is told as ENOSPC, and what was flushed is there"

    serve "$format" --when-full wait
    guest "write -P 3 24M 24M" "write -P 3 48M 24M" "write -P 4 72M 60M" "flush" >/tmp/writer 2>&1 &
    writer=$!
    within 60 "the disk says that it waits" waits
    sleep 3
    kill -0 $writer 2>/dev/null || fail "the guest did not wait: $(cat /tmp/writer)"
    shows 1 0 24
    extend_pool
    ok tapline disk /tmp/control.sock space
    within 120 "the guest goes on" over $writer
    wait $writer
    ! grep -qi "error\|no space" /tmp/writer || fail "the guest that waited was told of an error: $(cat /tmp/writer)"
    shows 1 0 24
    shows 3 24 48
    shows 4 72 60
    stop
    [ "$format" = raw ] || ok tapline-disk image check "$format:$thin"
    serve "$format" --read-only
    reading=-r
    shows 1 0 24
    shows 3 24 48
    shows 4 72 60
    reading=
    stop
    remove_volume
    held "$format: a guest that waits goes on when the pool is larger, and all is there"
}
waits() { tapline disk /tmp/control.sock stats --json | grep -Eq '"full": *true'; }
over() { ! kill -0 "$1" 2>/dev/null; }

for format in raw qcow2 vhd; do disk $format; done
