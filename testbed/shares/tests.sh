# What is claimed of a repository on a server's share, whatever the server.

ANSWER=15

address() { case $1 in one) echo 10.0.1.1 ;; other) echo 10.0.2.1 ;; esac; }

prepare() {
    tell "the server, two hosts and their daemons"
    mke2fs -q -t ext4 -m 0 -F /dev/vdc || fail "make the server's file system"
    mount -t ext4 /dev/vdc $srv || fail "mount the server's disk"
    ip link set lo up
    host one 1
    host other 2
    prepare_server
    daemon one
    bench-guest golden /tmp/golden.raw || fail "the golden image"
    mkdir /tmp/local
}

# options_are: those that mountinfo shows of the one mount of host one.
options_are() {
    local line option
    [ "$(mounts_of one | wc -l)" = 1 ] || fail "not one mount: $(mounts_of one)"
    line=$(mounts_of one)
    set -- $line
    for option in $OPTIONS_MOUNT; do
        case ",$6," in *",$option,"*) ;; *) fail "the mount is not $option: $line" ;; esac
    done
    for option in $OPTIONS_KIND; do
        case ",${line##* }," in *",$option,"*) ;; *) fail "the file system is not $option: $line" ;; esac
    done
    case $line in *" - $KIND "*) ;; *) fail "another kind of file system: $line" ;; esac
}

no_sr() { [ "$(one sr list --json | jq length)" = "${1:-0}" ] || fail "repositories are left: $(one sr list)"; }

repository_lives() {
    tell "a repository's life"
    ok one sr create share $(share one)
    options_are
    say "mount=$(mounts_of one)"
    [ "$(field one sr share state)" = attached ] || fail "it is not attached"
    [ "$(field one sr share variant.filesystem)" = $KIND ] || fail "its file system is $(field one sr share variant.filesystem)"
    [ "$(field one sr share variant.format)" = qcow2 ] || fail "its format is $(field one sr share variant.format)"
    one sr list | grep -q share || fail "sr list does not show it"
    held "sr create mounts with the options that are documented, sr list shows it"

    uuid=$(field one sr share uuid)
    ok one sr detach share
    nothing_mounted one || fail "detached and mounted"
    [ ! -e "/run/one/sr/$uuid" ] || fail "the mount point is left"
    ok one sr attach share
    options_are
    ok one sr detach share
    ok one sr forget share
    no_sr
    ok one sr probe $(share one)
    grep -q "$uuid" /tmp/said || fail "probe does not find it: $(said)"
    nothing_mounted one || fail "probed and mounted"
    ok one sr introduce share $(share one) --uuid "$uuid"
    options_are
    ok one sr destroy share --yes
    nothing_mounted one || fail "destroyed and mounted"
    [ -z "$(ls -A $files)" ] || fail "files are left: $(ls -A $files)"
    no_sr
    held "detach, forget, probe and destroy leave nothing mounted, attach and introduce mount it again"
}

nothing_is_left() {
    no_sr
    nothing_mounted one || fail "something is mounted: $(mounts_of one)"
    [ -z "$(ls -A /run/one/sr 2>/dev/null)" ] || fail "mount points are left: $(ls /run/one/sr)"
    ! pgrep -a mount >/tmp/pgrep || fail "a mount is under way: $(cat /tmp/pgrep)"
}

failures_are_told() {
    tell "what cannot be mounted"
    refused "$WRONG" one sr create share $(wrong_share one)
    say "said=$took s: $(said)"
    nothing_is_left
    held "a share that is not there is refused and leaves nothing"

    if [ "$SHARE" = smb ]; then
        refused "denied" one sr create share $(wrong_password one)
        say "said=$took s: $(said)"
        nothing_is_left
        held "a wrong password is refused and leaves nothing"
    else
        refused "permission denied" one sr create share $(squashed_share one)
        say "said=$took s: $(said)"
        nothing_is_left
        held "an export on which root is nobody is refused and leaves nothing"
    fi

    refused "$AWAY" one sr create share $(nobodys_share 10.0.1.77)
    say "said=$took s: $(said)"
    nothing_is_left
    held "a server that is not there is refused in bounded time and leaves nothing"

    server_stops
    refused "$AWAY" one sr create share $(share one)
    say "said=$took s: $(said)"
    nothing_is_left
    server_goes_on
    sleep 20
    nothing_is_left
    held "a host that serves nothing is refused in bounded time, and nothing is mounted when it does"

    ip link set to-one down
    refused "$AWAY" one sr create share $(share one)
    say "said=$took s: $(said)"
    nothing_is_left
    ip link set to-one up
    sleep 20
    nothing_is_left
    held "a server that is silent is refused in bounded time, and nothing is mounted when it is back"
}

# A disk's life in one format.
disk_lives() {
    local format=$1 disk=disk-$1
    tell "a disk's life: $format"
    ok one vdi import "$disk" /tmp/golden.raw --sr share --source-format raw --format "$format"
    plug one "$disk"
    works "$disk" 7 4
    held "$format: imported, plugged, written and read through the socket"

    work "$disk" 7 40 &
    local guest=$!
    ok one vdi snapshot "$disk" --name "$disk-kept"
    wait $guest
    worked "$disk"
    ok one vdi snapshot "$disk" --name "$disk-again"
    cp "/tmp/$disk.memory" "/tmp/$disk-clone.memory"
    ok one vdi clone "$disk-again" --name "$disk-clone"
    works "$disk" 7 4
    held "$format: kept twice and cloned while it is written"

    local on_disk_vbd=$vbd on_disk_socket=$socket on_disk_pid=$pid
    plug one "$disk-clone"
    works "$disk-clone" 7 0
    # It goes on with writes of its own.
    works "$disk-clone" 7 4
    unplug one
    vbd=$on_disk_vbd socket=$on_disk_socket pid=$on_disk_pid
    works "$disk" 7 0
    held "$format: the clone begins with what was kept, and neither changes the other"

    ok one vdi destroy "$disk-clone" --yes
    work "$disk" 7 40 &
    guest=$!
    ok one vdi destroy "$disk-kept" --yes
    ok one vdi destroy "$disk-again" --yes
    wait $guest
    worked "$disk"
    within 120 "$format: what the snapshots left is merged" one_file one "$disk"
    works "$disk" 7 4
    held "$format: merged under the guest when its snapshots were destroyed"

    ok one vdi resize "$disk" 80M
    works "$disk" 7 4
    unplug one
    [ "$(field one vdi "$disk" size)" = $((80 << 20)) ] || fail "its size is $(field one vdi "$disk" size)"
    ok one vdi export "$disk" "/tmp/$disk.raw" --format raw
    judged "$disk" "$format" "/tmp/$disk.raw"
    held "$format: resized, exported; qemu-img finds it sound and the same as its export"

    ok one vdi import "$disk-back" "/tmp/$disk.raw" --sr share --source-format raw --format "$format"
    cp "/tmp/$disk.memory" "/tmp/$disk-back.memory"
    plug one "$disk-back"
    works "$disk-back" 7 0
    unplug one
    ok one vdi destroy "$disk-back" --yes
    rm "/tmp/$disk.raw"
    held "$format: imported again, it holds the same"
}

# judged VDI FORMAT RAW: by QEMU, on the server's side.
judged() {
    local file kind=$2
    file=$files/$(field one vdi "$1" file)
    [ "$2" != vhd ] || kind=vpc
    [ "$2" != qcow2 ] || qemu-img check -f qcow2 "$file" >/tmp/said 2>&1 || fail "qemu-img check: $(said)"
    qemu-img compare -f $kind -F raw "$file" "$3" >/tmp/said 2>&1 || fail "qemu-img compare: $(said)"
}

prepare
repository_lives
failures_are_told
ok one sr create share $(share one)
disk_lives qcow2
disk_lives vhd
