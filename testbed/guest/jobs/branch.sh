# On the child: it begins as its parent was, and goes its own way.
# Parameters: REFERENCE, the SHA-256 of the file the parent holds
wait_for_disk
mount_disk
tell "the parent's files, seen through the child"
expect_sum reference "$REFERENCE"
say "sees=parent"

tell "changes: overwrite inside a file, delete one, add one"
marker_text child 65536 | dd of=$mnt/reference bs=4096 seek=700 conv=notrunc 2>/dev/null || fail "overwrite"
/tools/sync $mnt/reference
rm $mnt/doomed
new_file child-only 8
say "changed=$(sum $mnt/reference)"
say "added=$(sum $mnt/child-only)"
unmount_and_check
