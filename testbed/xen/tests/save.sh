# A guest with a verified load is saved to a file and restored: its disk named in xl's configuration, and another time attached by
# us. Saved without being stopped (a checkpoint), and where there is no room for the file, it goes on. Nothing that it wrote is
# lost, and no process and no node is left while it lies in the file.
. /drop/life.sh
ram_disks 1 12
xl_names_disks
saved=/tmp/saved

# verified GUEST: it has what it wrote before it was saved, and its load goes on.
verified() {
    goes_on "$1"
    before=$(grep -ac "TAPLINE checked" "$(console_of "$1")")
    answer "$1"
    checked() { [ "$(grep -ac "TAPLINE checked" "$(console_of "$1")")" -gt "$before" ]; }
    soon "answer of $1" 60 checked "$1"
    expect "what $1 has" "$(said "$1" found)" "$(said "$1" kept)"
}

# at_rest: of a guest that lies in a file nothing is here, and nobody writes to its disk.
at_rest() {
    wait_gone a 60
    nothing_left
    no_xl_nodes
    content=$(hash_of /dev/ram0)
    sleep 2
    expect "the disk of a guest that lies in a file" "$(hash_of /dev/ram0)" "$content"
}

guest_memory=128
disks="'$(named /dev/ram0 xvda w)'"
guest a saved ""
wait_said a round=1 200
pid=$(server_of a xvda)
node=$(end_of a xvda)

# Neither stops it.
xl save -c a $saved || fail "a checkpoint"
rm $saved
verified a
mkdir /tmp/small
mount -t tmpfs -o size=4m tmpfs /tmp/small || fail "tmpfs"
xl save a /tmp/small/saved && fail "128 MiB in 4 MiB"
umount /tmp/small
verified a
expect "who serves it" "$(server_of a xvda)" "$pid"
state_is "$node" 4 || fail "$node is not connected"

for each in first second; do
    xl save a $saved || fail "the $each save"
    [ ! -d "/proc/$pid" ] || wait_dead "$pid" 20
    at_rest
    xl restore $saved || fail "the $each restore"
    rm $saved
    pid=$(server_of a xvda)
    verified a
done
expect "the keys of both ends" "$(xenstore-ls "$(end_of a xvda)" | grep -c -e 'state = "4"' -e 'online = "1"')" 2
xl destroy a || fail "xl destroy"
wait_gone a 60
nothing_left

# xl does not know of a disk that we have attached: it is attached again before the guest goes on.
disks=
guest a saved ""
attach a raw:/dev/ram0 xvda
wait_said a round=1 200
xl save -c a $saved || fail "a checkpoint with a disk of ours"
rm $saved
verified a
xl save a $saved || fail "save with a disk of ours"
at_rest
xl restore -p $saved || fail "restore with a disk of ours"
rm $saved
serve a /dev/ram0 xvda
xl unpause a || fail "unpause"
verified a
xl destroy a || fail "xl destroy"
wait_gone a 60
nothing_left
