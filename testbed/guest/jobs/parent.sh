# On the parent alone, read-only: nothing of the child shows.
# Parameters: REFERENCE
wait_for_disk
mount_disk ro,noload
tell "the parent alone"
expect_sum reference "$REFERENCE"
[ -e $mnt/doomed ] || fail "a file deleted in the child is gone from the parent"
[ ! -e $mnt/child-only ] || fail "a file made in the child shows in the parent"
umount $mnt || fail "umount"
say "sees=itself"
