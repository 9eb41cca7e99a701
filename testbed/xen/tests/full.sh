# The process of a disk is replaced while writes of its guest wait for space: they stay in the guest's ring, the next process does
# them when there is space, and the guest sees no error.
. /drop/life.sh
images 24
truncate -s 12M /images/disk.raw
dd if=/dev/zero of=/images/filler bs=64k 2>/dev/null
guest a full ""
$tapline xen attach a raw:/images/disk.raw --vdev xvda --no-serve || fail "attach"
socket=/run/tapline/xen-$(xl domid a)-xvda.sock
setsid /drop/tapline-disk serve raw:/images/disk.raw --xen a/xvda --when-full wait --control "$socket" 2>>/out/disk.log &
is_full() { $tapline disk "$socket" stats --json 2>/dev/null | grep -q '"full":true'; }
wait_said a writing=yes 200
soon "write that waits" 60 is_full
before=$(server_of a xvda)
$tapline xen upgrade a xvda || { cat /out/disk.log; fail "upgrade"; }
grep -q "waiting requests stay with their guest" /out/disk.log || { cat /out/disk.log; fail "none was left"; }
[ "$(server_of a xvda)" != "$before" ] || fail "it is the same process"
soon "write that waits for the next process" 60 is_full
grep -aq "TAPLINE fail" "$(console_of a)" && fail "the guest was told"
rm /images/filler
wait_end a 200
nothing_left
