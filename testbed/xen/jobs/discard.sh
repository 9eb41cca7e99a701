# Gives back what a disk has, by the block and by the file system, and looks at what is left; dom0 measures in between.
# By itself the disk holds random bytes in all of its $mib MiB.
wait_for_disk
place=/sys/block/xvda
read -r granularity <$place/queue/discard_granularity
read -r most <$place/queue/discard_max_bytes
read -r alignment <$place/discard_alignment
say "limits=$granularity $alignment $most"
part() { # from bytes, in sectors
    set -- $(dd if=$disk bs=512 skip="$1" count="$2" 2>/dev/null | md5sum)
    echo "$1"
}
zeros() {
    set -- $(head -c $(($1 * 512)) /dev/zero | md5sum)
    echo "$1"
}
# 8 MiB from 4 MiB on; then, from 1 MiB and a sector on, 1 MiB and two sectors, of which whole units lie within.
before=$(part 0 2049)$(part 4099 4093)$(part 24576 1024)
ask whole
blkdiscard -o 4194304 -l 8388608 $disk || fail "blkdiscard"
[ "$(part 8192 16384)" = "$(zeros 16384)" ] || fail "what was discarded does not read as zeroes"
ask odd
blkdiscard -o 1049088 -l 1049600 $disk || fail "blkdiscard of odd length"
forget
[ "$(part 0 2049)$(part 4099 4093)$(part 24576 1024)" = "$before" ] || fail "a discard has changed what lies beside"
ask discarded
make_filesystem
mount_disk
new_file keep 2
new_file drop 6
kept=$(sum $mnt/keep)
trim drop
forget
expect_sum keep "$kept"
new_file again 4
unmount_and_check
