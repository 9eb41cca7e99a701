# Random reads at each queue depth; the host asks the guest before and after what its kernel counts.
# Parameters: DEPTHS, READS
wait_for_disk
/job/tapline-guest >/tmp/reader 2>&1 &
reader=$!

# How often the reader has slept, once it sleeps.
slept() {
    while read -r _ _ state _ <"/proc/$reader/stat" && [ "$state" != S ]; do :; done
    while read -r key value; do
        [ "$key" != voluntary_ctxt_switches: ] || echo "$value"
    done <"/proc/$reader/status"
}

for depth in $DEPTHS; do
    ask "before $depth"
    before=$(slept)
    tell "fio: $READS random reads of 4 KiB, $depth at once"
    /tools/fio --name=layers --filename=$disk --readonly --rw=randread --norandommap --bs=4k --direct=1 --ioengine=libaio \
        --iodepth="$depth" --io_size="$((READS * 4096))" --size=64M --output=/tmp/fio </dev/null || { cat /tmp/fio; fail "fio"; }
    kill -0 $reader || fail "tapline-guest has ended: $(cat /tmp/reader)"
    say "woken=$(($(slept) - before))"
    ask "after $depth"
done
