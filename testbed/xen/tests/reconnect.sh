# A front end comes and goes twenty times on one disk process: every other time Linux's driver is taken from the device, which it
# closes, else the guest's end is removed under it. Nothing of one front end is left when the next comes.
#
# A driver that is bound again does not begin anew: it waits for a device that does. So the guest's end is made anew each time.
. /drop/life.sh
ram_disks 1 12
rounds=20
guest a reconnect "rounds=$rounds"
soon "guest" 60 has_said a init=
# Those of its console and store.
granted=$(granted "$(xl domid a)")
attach a raw:/dev/ram0 xvda
id=$(xl domid a)
pid=$(server_of a xvda)
node=$(end_of a xvda)
front=/local/domain/$id/device/vbd/51712
console=$(xenstore-read "/local/domain/$id/console/tty")
n=1
while [ $n -le $rounds ]; do
    soon "a front end in round $n" 30 has_said a "used=$n"
    expect "the process" "$(xenstore-read "$node/tapline/pid")" "$pid"
    # How many pages lie in one mapping is the load's affair.
    now=$(holdings "$pid" | sed 's/ mappings=[0-9]*//')
    if [ $n = 1 ]; then
        first=$now
        # One channel is the disk's; the others are the guest's console and store.
        alone="${first% *} mappings=0 channels=$((${first##*=} - 1))"
    fi
    [ $n -gt 3 ] || memory=$(memory_of "$pid")
    expect "what the process holds in round $n" "$now" "$first"
    if [ $((n % 2)) = 0 ]; then
        echo unbind >"$console"
        soon "the driver's end" 20 state_is "$front" 6
    fi
    xenstore-rm "$front"
    soon "our end closed" 20 state_is "$node" 6
    soon "the guest without the disk" 20 has_said a "gone=$n"
    expect "what the process holds without a guest" "$(holdings "$pid")" "$alone"
    # Xen needs a while to say it.
    [ $((n % 5)) != 0 ] || expect "pages of the guest that others hold" "$(granted "$id")" "$granted"
    n=$((n + 1))
    [ $n -gt $rounds ] || $tapline xen attach a raw:/dev/ram0 --vdev xvda --no-serve || fail "the guest's end of round $n"
done
echo "first $first, last $now"
grew=$(($(memory_of "$pid") - memory))
[ $grew -lt 512 ] || fail "the process has grown by $grew kB"
$tapline xen detach a xvda --force || fail "detach"
wait_dead "$pid" 10
answer a enough
wait_end a 60
nothing_left
