#!/bin/sh
# Makes the corpus of the target qcow2_image again: sh fuzz/qcow2_corpus.sh (needs qemu-img, qemu-io and a built tapline).
#
# Images hold a sector here and there: that is all that their inputs have to say. What the fuzzer found is not made here;
# its inputs have names that begin with "found-".
set -eu
here=$(cd "$(dirname "$0")" && pwd)
corpus=$here/corpus/qcow2_image
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
cargo build -q --manifest-path "$here/Cargo.toml" --bin qcow2_input
mkdir -p "$corpus"
cd "$room"
truncate -s 1M base.raw

# Operation, place, number of sectors, fill: what the body of the target makes of them.
writes="0000000511 0000020222 0000ff0333 8001002044 0500000000 00c0020355"
others="0300010300 0400000700 0300800f02 8400402000 0600000700 0500000000"
mixed="0000030112 0300000202 0000030113 0400000700 0700000900 00c0020355 0500000000 0000ff0f35 0400ff0f00"

# NAME: the image of that name with each of the lists of requests.
input() {
    "$here/target/debug/qcow2_input" image "$corpus/$1-write" $writes
    "$here/target/debug/qcow2_input" image "$corpus/$1-clear" $others
    "$here/target/debug/qcow2_input" image "$corpus/$1-mixed" $mixed
}
# SIZE OPTIONS: a new image.
create() {
    rm -f image
    qemu-img create -q -f qcow2 -o "$2" image "$1"
}
io() {
    for command in "$@"; do set -- "$@" -c "$command"; shift; done
    qemu-io -f qcow2 "$@" image >/dev/null 2>&1 || true
}
fill() {
    io "write -P 1 0 512" "write -P 2 70k 1k" "write -z 128k 64k" "discard 70k 512" "write -P 3 200k 512"
}
# OFFSET BYTES: changes the image; the bytes are as printf takes them.
poke() {
    printf "$2" | dd of=image bs=1 seek="$1" conv=notrunc 2>/dev/null
}
# OFFSET: the entry there, without its marks, which are in the first byte and in the last nine bits.
place() {
    echo $((0x$(od -An -tx1 -j $(($1 + 1)) -N 7 image | tr -d ' \n') & 0x00fffffffffffe00))
}

for size in 512 4096 65536 2097152; do
    create 300k "cluster_size=$size"; fill; input "cluster-$size"
done
for bits in 1 2 8 64; do
    create 100k "cluster_size=512,refcount_bits=$bits"; fill; input "refcounts-$bits"
done
create 300k cluster_size=4k,backing_file=base.raw,backing_fmt=raw; fill; input child-4096
create 300k backing_file=base.raw,backing_fmt=raw; fill; input child-65536
for type in zlib zstd; do
    create 300k "cluster_size=4k,compression_type=$type"
    io "write -c -P 1 0 4k" "write -c -P 2 4k 4k" "write -c -P 3 64k 4k" "write -P 4 128k 512"; input "packed-$type"
done
create 300k compression_type=zlib; io "write -c -P 7 0 64k" "write -c -P 8 64k 64k"; input packed-65536
create 300k cluster_size=4k; fill; qemu-img bitmap --add -g 4k image one; fill; qemu-img bitmap --add --disable image two
input bitmaps
create 100k cluster_size=1k; fill; qemu-img snapshot -c one image; fill; qemu-img snapshot -c two image
input snapshots; qemu-img snapshot -d one image; qemu-img snapshot -d two image; input snapshots-deleted
create 300k cluster_size=4k,lazy_refcounts=on; fill; input lazy; io "write -P 5 32k 512" "write -P 6 100k 1k" abort
input lazy-dirty
create 300k cluster_size=4k,compat=0.10; fill; input version-2
create 100k cluster_size=1k,preallocation=metadata; input preallocated
create 64M cluster_size=512; io "write -P 1 0 512" "write -P 2 32M 512" "write -P 3 65535k 512"; input wide
rm -f image child
"$here/../target/debug/tapline" image create qcow2:image --size 4M >/dev/null; input tapline
"$here/../target/debug/tapline" image snapshot qcow2:image --to qcow2:child >/dev/null
mv child image; input tapline-child

damaged() {
    create 100k cluster_size=1k; fill
    l1=$(place 40); l2=$(place "$l1"); table=$(place 48); block=$(place "$table"); data=$(place "$l2")
}
damaged; poke $((block + 2 * (data / 1024))) '\0\0'; input damaged-refcount-low
damaged; poke $((block + 2 * (data / 1024))) '\0\7'; input damaged-refcount-high
damaged; poke $((block + 100)) '\0\1\0\1'; input damaged-leaks
damaged; poke "$table" '\0\0\0\0\0\0\0\0'; input damaged-no-block
damaged; poke $((table + 8)) '\0\0\0\0\0\1\0\0'; input damaged-block-behind-end
damaged; poke 48 '\0\0\0\0\0\0\0\0'; input damaged-no-refcount-table
damaged; poke 79 '\2'; input damaged-marked-corrupt
damaged; poke 79 '\1'; input damaged-marked-dirty
damaged; poke "$l2" '\0'; input damaged-not-copied
damaged; dd if=image of=image bs=1 skip="$l2" seek=$((l2 + 8)) count=8 conv=notrunc 2>/dev/null; input damaged-shared
damaged; poke $((l2 + 16)) '\200\0\0\0\0\7\0\0'; input damaged-data-behind-end
damaged; poke $((l2 + 21)) '\0\2\3'; input damaged-unaligned
damaged; dd if=image of=image bs=1 skip="$l1" seek=$((l1 + 8)) count=8 conv=notrunc 2>/dev/null; input damaged-shared-table
damaged; dd if=image of=image bs=1 skip="$((table))" seek="$l2" count=8 conv=notrunc 2>/dev/null; input damaged-data-is-block
damaged; truncate -s "$data" image; input damaged-cut-off
damaged; poke 87 '\1'; poke 95 '\6'; input damaged-autoclear
