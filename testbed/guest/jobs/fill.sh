# A new filesystem; writes that are verified; a load that is measured; space given back.
# Parameters: FILL_MIB, LOAD_SECONDS
wait_for_disk
make_filesystem
mount_disk

tell "a reference file"
new_file reference 8
reference=$(sum $mnt/reference)
say "reference=$reference"
new_file doomed 1

tell "fio: sequential writes of $FILL_MIB MiB, read back and verified"
load sequential big --rw=write --bs=256k --size="${FILL_MIB}M" --ioengine=libaio --iodepth=8

tell "fio: random 4 KiB writes, read back and verified"
load scattered big --rw=randwrite --bs=4k --size="${FILL_MIB}M" --ioengine=libaio --iodepth=16

# A job that is time_based is measured and never verified.
tell "fio: random 4 KiB reads and writes for $LOAD_SECONDS s"
ask window-begin
statistics load-begin
/tools/fio --name=random --filename=$mnt/big --rw=randrw --bs=4k --size="${FILL_MIB}M" --direct=1 --ioengine=libaio --iodepth=16 \
    --time_based --runtime="$LOAD_SECONDS" --eta=always --eta-newline=1 || fail "fio random ended with $?"
statistics load-end
ask window-end

tell "fio: 16 KiB writes, fsync after every eighth"
load fsynced small --rw=randwrite --bs=16k --size=16M --ioengine=psync --fsync=8

trim big small

forget
expect_sum reference "$reference"
unmount_and_check
