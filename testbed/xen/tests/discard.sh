# What a guest discards, and what fstrim gives back, the image's file no longer takes; zeroes are read there, all else stays. A raw
# file, and for our backend a qcow2 beside it.
. /drop/storage.sh
images 96
mib=$((1 << 20))

# one GUEST FILE DISK GRANULARITY: the test on one image, which is full.
one() {
    guest "$1" discard "" "$3"
    wait_said "$1" ask=whole 200
    [ "$4" = any ] || expect "granularity and alignment" "$(said "$1" limits | cut -d ' ' -f 1,2)" "$4 0"
    full=$(taken "$2")
    [ "$full" -ge $((24 * mib)) ] || fail "the image takes $full bytes before the test"
    answer "$1"
    wait_said "$1" ask=odd 60
    odd=$(taken "$2")
    # The file system may need a block of its own to tell of the hole.
    [ $((full - odd)) = $((8 * mib)) ] || [ $((full - odd)) = $((8 * mib - 4096)) ] || fail "a discard of 8 MiB gives back $((full - odd)) bytes"
    answer "$1"
    wait_said "$1" ask=discarded 60
    # Those of its units that it covers whole.
    given=$((odd - $(taken "$2")))
    [ $given -ge $((mib - 65536)) ] && [ $given -le $((mib + 1024)) ] || fail "a discard of 1 MiB and two sectors gives back $given bytes"
    answer "$1"
    wait_said "$1" ask=trim-before 100
    before=$(taken "$2")
    answer "$1"
    wait_said "$1" ask=trim-after 60
    given=$((before - $(taken "$2")))
    [ $given -ge $((6 * mib)) ] || fail "fstrim gives back $given bytes of a file of 6 MiB"
    answer "$1"
    wait_end "$1" 200
}

fill /images/disk.raw 24
cp /images/disk.raw /tmp/content
case $backend in
blkback) one a /images/disk.raw "$(looped /images/disk.raw)" 4096 ;;
qdisk) one a /images/disk.raw /images/disk.raw any ;;
tapline)
    one a /images/disk.raw /images/disk.raw 4096
    rm /images/disk.raw
    image convert raw:/tmp/content qcow2:/images/disk.qcow2 --cache writeback
    one b /images/disk.qcow2 qcow2:/images/disk.qcow2 65536
    sound qcow2:/images/disk.qcow2
    ;;
esac
