# xenstored is killed under a load that is verified, and started again: Debian's then knows nothing. The guest's I/O goes on, its
# disks' processes say once what is the matter and cost nothing when they are idle, and both can be ended: with a store that knows
# nothing of them, and without one.
. /drop/life.sh
ram_disks 2 8
guest a rounds "disks='xvda xvdb'"
attach a raw:/dev/ram0 xvda
attach a raw:/dev/ram1 xvdb
wait_said a round=1 200
id=$(xl domid a)
console=$(xenstore-read "/local/domain/$id/console/tty")
a=$(server_of a xvda)
b=$(server_of a xvdb)

no_store() {
    store=$(cat /run/xen/xenstored.pid)
    kill -9 "$store"
    wait_dead "$store" 5
    rm -f /run/xen/xenstored.pid
}
another_store() {
    "$(PATH="$(echo /usr/lib/xen-4.*/bin):$PATH" command -v xenstored)" --pid-file /run/xen/xenstored.pid || fail "xenstored"
    soon "answer of the store" 30 xenstore-read -s /tool >/dev/null
}
# spent PID: processor time, and how often it has slept.
spent() { echo "$(cut -d ' ' -f 14,15 "/proc/$1/stat") $(grep ^voluntary "/proc/$1/status")"; }
# ended NAME PID: by detach; the guest that it served need not be known.
ended() {
    refused 4 'cannot find the domain\|does not run' $tapline xen detach "$id" "$1"
    [ -d "/proc/$2" ] || fail "the process of $1 is gone already"
    $tapline xen detach "$id" "$1" --force || fail "detach --force of $1"
    wait_dead "$2" 1
    ! ls /run/tapline /dev/shm | grep -e "-$id-$1" -e "-$id-$(number_of "$1")" || fail "files of $1 are left"
}

no_store
goes_on a
another_store
goes_on a
refused 4 'cannot find the domain' $tapline xen upgrade "$id" xvda
goes_on a
for each in xvda xvdb; do
    log=/out/serve-a-$each.log
    expect "what is told of $each" "$(grep -c "tapline xen upgrade $id $each" "$log") $(grep -c 'store is lost' "$log")" "1 2"
done

echo enough >"$console"
wait_said a end=ok 100
expect "what xvda holds" "$(hash_of /dev/ram0)" "$(said a xvda)"
expect "what xvdb holds" "$(hash_of /dev/ram1)" "$(said a xvdb)"
sleep 6
before=$(spent "$a")
sleep 5
expect "what an idle disk has spent in 5 s" "$(spent "$a")" "$before"

ended xvda "$a"
no_store
ended xvdb "$b"
refused 4 'does not run' $tapline xen detach "$id" xvdb --force
expect "the locks on images" "$(grep -c OFDLCK /proc/locks)" 0
another_store
# Who would do this have lost their store as well: the toolstack's watcher, and the daemon that keeps the page of the console.
xl destroy "$id"
kill "$(pidof xenconsoled)"
only_dom0() { [ "$(xl list | wc -l)" = 2 ]; }
soon "end of the guest" 20 only_dom0
