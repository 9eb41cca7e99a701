# After the crash: everything that was announced as fsynced is there.
# Parameters: MARKERS, how many were announced; SUMS, `name:sha256 ...` of files that must be as they were
wait_for_disk
mount_disk
tell "$MARKERS markers"
expect_markers "$MARKERS"
for pair in $SUMS; do
    expect_sum "${pair%%:*}" "${pair#*:}"
done
unmount_and_check
