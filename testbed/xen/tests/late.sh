# The processes of two disks, one whose mappings stay and one that copies, are killed while writes of theirs are held up in the
# kernel. Until the last of them has ended each image stays locked, so that no other process writes beside them; domain 0 survives;
# then others follow, and the guest, whose load is verified, has seen nothing.
. /drop/life.sh
ram_disks 2 8
slow_group

# What is on the storage, past dom0's page cache.
content() { dd if="$1" bs=1M iflag=direct 2>/dev/null | md5sum; }
locks() { grep -c OFDLCK /proc/locks; }
no_lock() { [ "$(locks)" = 0 ]; }
# The kernel's word for whatever should not have happened.
kernel_is_well() {
    ! dmesg | grep -i 'BUG:\|bad page\|oops\|cut here' || { dmesg | tail -n 300 >/out/dmesg; fail "domain 0's kernel is not well"; }
}
early() { # NAME: one that comes too early waits for a second, and says then what is the matter.
    xargs -0 setsid <"/tmp/words-$1" >"/tmp/early-$1" 2>&1 && fail "two write to one image"
    cat "/tmp/early-$1"
    grep -q 'in use\|already does' "/tmp/early-$1" || fail "who comes too early does not say so"
}

guest a rounds "disks='xvda xvdb'"
attach a raw:/dev/ram0 xvda
attach a raw:/dev/ram1 xvdb --grants copy
kernel_is_well
wait_said a round=1 200
a=$(server_of a xvda)
b=$(server_of a xvdb)
cat "/proc/$a/cmdline" >/tmp/words-xvda
cat "/proc/$b/cmdline" >/tmp/words-xvdb
for number in 0 1; do
    # Three writes a second; what was begun before is no matter.
    echo "$(cat /sys/block/ram$number/dev) wiops=3" >/cgroup/slow/io.max || fail "io.max"
done
echo "$a" >/cgroup/slow/cgroup.procs && echo "$b" >/cgroup/slow/cgroup.procs || fail "cgroup.procs"
sleep 2
kill -9 "$a" "$b"
before_a=$(content /dev/ram0)
before_b=$(content /dev/ram1)
early xvda
early xvdb
expect "the locks of the processes that were killed" "$(locks)" 2
soon "end of the locks" 100 no_lock
kernel_is_well
after_a=$(content /dev/ram0)
after_b=$(content /dev/ram1)
[ "$before_a" != "$after_a" ] && [ "$before_b" != "$after_b" ] || fail "no write was under way"
sleep 3
expect "the first some time after its lock's end" "$(content /dev/ram0)" "$after_a"
expect "the second some time after its lock's end" "$(content /dev/ram1)" "$after_b"
wait_dead "$a" 5
wait_dead "$b" 5
for each in xvda xvdb; do
    xargs -0 setsid <"/tmp/words-$each" >>"/out/serve-a-$each.log" 2>&1 &
done
goes_on a
answer a enough
wait_end a 100
nothing_left
kernel_is_well
grep -q 'taken over.*persistent mapping' /out/serve-a-xvda.log || fail "no mappings were taken over"
grep -q 'taken over.*by copies' /out/serve-a-xvdb.log || fail "no copies after a take-over"
expect "what xvda holds" "$(hash_of /dev/ram0)" "$(said a xvda)"
expect "what xvdb holds" "$(hash_of /dev/ram1)" "$(said a xvdb)"
