# A disk that was used and is idle costs next to nothing: its process is not woken once in 30 s, and has at most 2 MiB.
#
# What counts is Pss: what the process has for itself, and its share of what others have as well. Pages of the guest that
# it keeps mapped are in it where Linux counts them, and are the guest's: they are taken off.
ram_disks 1 24
guest a idle "" /dev/ram0
wait_said a idle=yes 200
sleep 5
read -r pid </run/tapline/xen-tapline-"$(xl domid a)"-51712.pid || fail "nobody serves the disk"
# wakes: how often its threads have gone to sleep so far.
wakes() { cat /proc/"$pid"/task/*/status | awk '/^voluntary_ctxt_switches/ { all += $2 } END { print all }'; }
before=$(wakes)
look() { for t in /proc/$pid/task/*; do echo "$1 $(cat $t/comm) $(grep -h ctxt $t/status | tr '\n' ' ') $(cat $t/wchan)"; done; od -An -tu8 /dev/shm/vbd3-*/statistics | tr '\n' ' '; echo; grep -i -E "xen|evtchn" /proc/interrupts; }
look one
for i in 1 2 3 4 5 6; do sleep 5; echo "$i $(wakes)"; done
look two
cat /proc/$pid/smaps_rollup
cp /proc/"$pid"/smaps /out/smaps
cat /out/serve*
expect "wake-ups in 30 s" $(($(wakes) - before)) 0
cp /proc/"$pid"/smaps /out/smaps
cp /proc/"$pid"/status /out/status
awk '/^[0-9a-f]+-[0-9a-f]+ / { guests = /\/dev\/xen\/gntdev/ } /^Pss:/ { all += $2; if (guests) theirs += $2 }
    END { print all - theirs, theirs + 0 }' /out/smaps >/out/pss
read -r ours theirs </out/pss
echo "Pss: $ours KiB, and $theirs KiB of the guest's pages"
[ "$ours" -gt 0 ] && [ "$ours" -le 2048 ] || fail "an idle disk has $ours KiB"
xl destroy a || fail "xl destroy"
wait_gone a 60
