# What is claimed of a repository on a server's share, whatever the server.

ANSWER=15
# Of the host's files: where there is direct I/O, which tmpfs does not always have.
room=/var/tmp

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
    bench-guest golden "$room"/golden.raw || fail "the golden image"
    mkdir $room/local
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
    ! pgrep -a '^u?mount' >/tmp/pgrep || fail "a mount is under way: $(cat /tmp/pgrep)"
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
    ok one vdi import "$disk" $room/golden.raw --sr share --source-format raw --format "$format"
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

    ok one vdi resize "$disk" --size 80M
    works "$disk" 7 4
    unplug one
    [ "$(field one vdi "$disk" size)" = $((80 << 20)) ] || fail "its size is $(field one vdi "$disk" size)"
    ok one vdi export "$disk" "$room/$disk.raw" --format raw
    judged "$disk" "$format" "$room/$disk.raw"
    held "$format: resized, exported; qemu-img finds it sound and the same as its export"

    ok one vdi import "$disk-back" "$room/$disk.raw" --sr share --source-format raw --format "$format"
    cp "/tmp/$disk.memory" "/tmp/$disk-back.memory"
    plug one "$disk-back"
    works "$disk-back" 7 0
    unplug one
    ok one vdi destroy "$disk-back" --yes
    ok one vdi destroy "$disk" --yes
    rm "$room/$disk.raw"
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

# state HOST SR STATE
state() { [ "$(field "$1" sr "$2" state)" = "$3" ]; }
is_full() { [ "$(field one sr share space.full)" = "$1" ]; }
# over PROCESS: it has ended.
over() { ! kill -0 "$1" 2>/dev/null; }
at_work() { kill -0 "$1" 2>/dev/null || fail "the guest did not wait: $(cat "/tmp/$2.outcome")"; }

# Two hosts and one repository: of the two that want it, or a disk in it, one has it.
leases_hold() {
    tell "leases"
    local disk=leased vdi vbd_of_other
    uuid=$(field one sr share uuid)
    ok one vdi import $disk $room/golden.raw --sr share --source-format raw
    vdi=$(field one vdi $disk uuid)
    ok one sr detach share
    daemon other
    ok other sr introduce share $(share other) --uuid "$uuid"
    ok other sr scan share
    ok other vbd create --vdi "$vdi"
    vbd_of_other=$(other vbd list --vdi "$vdi" --json | jq -r '.[0].uuid')
    ok other sr detach share
    ok one sr attach share
    held "a disk is found by another host when the first has let go of the repository"

    plug one $disk
    works $disk 9 4
    refused "already attached" other sr attach share
    say "said=$took s: $(said)"
    nothing_mounted other || fail "refused and mounted"
    held "another host is refused the repository that is attached"

    # What has the repository dies, and what has the disk does not.
    kill -KILL "${pids[one]}"
    wait "${pids[one]}" 2>/dev/null
    ok other sr attach share
    local of_one=$pid vbd_of_one=$vbd
    vbd=$vbd_of_other
    refused "in use|lock|another" other vbd plug "$vbd"
    say "said=$took s: $(said)"
    works $disk 9 4
    held "another host is refused the disk that a process without a daemon still serves"

    kill -KILL "$of_one"
    within 60 "the disk of a killed process can be plugged" other vbd plug "$vbd" >/tmp/said 2>&1
    served other
    works $disk 9 4
    held "the other host has the disk when that process was killed, with all that was written"

    daemon one
    within 60 "host one has lost what the other has" state one share lost
    works $disk 9 4
    ok other vbd unplug "$vbd"
    ok other vbd destroy "$vbd"
    ok other sr detach share
    ok other sr forget share
    within 60 "host one has its repository again" state one share attached
    [ "$(mounts_of one | wc -l)" = 1 ] || fail "not one mount: $(mounts_of one)"
    vbd=$vbd_of_one
    # Its process had gone with nothing to start another one on, often enough that it stays down until somebody says otherwise.
    ok one vbd unplug "$vbd"
    ok one vbd plug "$vbd"
    served one
    works $disk 9 4
    unplug one
    held "the first host finds repository and disk again when the other has let go"
    ok one vdi destroy $disk --yes
}

# named HOST: its VDIs as the catalogue has them, but for what is measured or only this host knows.
named() { "$1" vdi list --json | jq -cS 'map(del(.physical_utilisation, .users)) | sort_by(.uuid)'; }

# same HOST VDIS: they are those.
same() { [ "$(named "$1")" = "$2" ] || fail "$1 has other VDIs: $(named "$1"), and not $2"; }

# A repository says itself what is in it, to any host.
describes_itself() {
    tell "inventories"
    local disk=described known
    uuid=$(field one sr share uuid)
    [ -n "${pids[other]:-}" ] || daemon other
    ok one vdi import $disk $room/golden.raw --sr share --source-format raw
    ok one vdi snapshot $disk --name $disk-kept
    ok one vdi clone $disk-kept --name $disk-clone
    known=$(named one)
    [ "$(echo "$known" | jq length)" = 3 ] || fail "not three VDIs: $known"
    ok one sr detach share
    ok one sr forget share
    ok other sr introduce share $(share other) --uuid "$uuid"
    same other "$known"
    ok other sr scan share
    same other "$known"
    held "forgotten by one host, it gives another the UUIDs, names and snapshots of its disks"

    ok other vdi snapshot $disk --name $disk-elsewhere
    ok other sr detach share
    ok one sr introduce share $(share one) --uuid "$uuid"
    same one "$(named other)"
    ok one vdi destroy $disk-clone --yes
    known=$(named one)
    ok one sr detach share
    ok other sr attach share
    same other "$known"
    held "what one host has changed is known to the other when it attaches it again"

    ok other sr detach share
    ok other sr forget share
    ok one sr attach share
    for vdi in $disk-kept $disk-elsewhere $disk; do destroyed $vdi; done
}

# destroyed VDI: when what a destroyed snapshot has left is merged, which may be under way.
destroyed() { within 100 "$1 is destroyed" one vdi destroy "$1" --yes >/tmp/said 2>&1; }

# promptly SECONDS WORDS...: host one's daemon answers, and in that time.
promptly() {
    local limit=$1
    shift
    TAPLINE_SOCKET=/run/one/taplined.sock timeout "$limit" tapline "$@"
}

# What does not lie on the server goes on.
others_are_served() {
    ok promptly 20 sr list
    ok promptly 20 sr show share
    ok promptly 20 vdi list
    ok promptly 60 vdi create aside --sr here --size 16M
    ok promptly 60 vdi snapshot aside --name aside-kept
    ok promptly 60 vdi destroy aside-kept --yes
    destroyed aside
}

# Rounds of writes that take longer than a server is away.
rounds=300

# away HOW SECONDS STOP START: the server goes in the middle of I/O and comes back.
away() {
    local how=$1 long=$2 stop=$3 start=$4 disk=patient guest
    tell "the server $how"
    work $disk 11 "$rounds" &
    guest=$!
    sleep 3
    $stop
    local begun
    begun=$(seconds)
    others_are_served
    while [ $(($(seconds) - begun)) -lt "$long" ]; do
        ok promptly 20 sr list
        sleep 2
    done
    at_work $guest $disk
    held "$how: guests wait, and the daemon serves what lies elsewhere"
    $start
    within 200 "the guest goes on" over $guest
    wait $guest
    worked $disk
    within 60 "the repository is attached" state one share attached
    works $disk 11 2
    ok one vdi snapshot $disk --name $disk-kept
    ok one vdi destroy $disk-kept --yes
    held "$how: I/O goes on when it is back, and nothing is lost"
}
link_down() { ip link set to-one down; }
link_up() { ip link set to-one up; }

server_goes_away() {
    ok one sr create here --dir $room/local
    ok one vdi import patient $room/golden.raw --sr share --source-format raw
    plug one patient
    away "stops" 10 server_stops server_goes_on
    away "is silent" 20 link_down link_up
    unplug one
    judged_sound patient
    destroyed patient
    ok one sr destroy here --yes
}
judged_sound() {
    local file
    file=$files/$(field one vdi "$1" file)
    qemu-img check -f qcow2 "$file" >/tmp/said 2>&1 || fail "qemu-img check: $(said)"
}

server_fills() {
    tell "the server's disk is full"
    local disk=thick guest
    ok one vdi import $disk $room/golden.raw --sr share --source-format raw
    plug one $disk
    works $disk 13 1
    # From here on what is written takes space.
    ok one vdi snapshot $disk --name $disk-kept
    one event follow --json >/tmp/events 2>&1 &
    local follower=$!
    fallocate -l $(($(stat -f -c "%a * %S" $srv) - (1 << 20))) $srv/ballast || fail "fill the server's disk"
    work $disk 13 60 &
    guest=$!
    within 60 "the repository is full" is_full true
    sleep 5
    at_work $guest $disk
    [ "$(field one vbd "$vbd" waits_for_space)" = true ] || fail "the VBD does not say that it waits: $(one vbd show "$vbd")"
    for word in full waits_for_space; do
        grep -Eq "\"$word\": *true" /tmp/events || fail "no event says $word: $(cut -c 1-300 /tmp/events)"
    done
    refused "besides its reserve" one vdi create large --sr share --size 64M --format raw
    held "a guest waits when the server's disk is full; the repository and an event say so"
    rm $srv/ballast
    within 100 "the guest goes on" over $guest
    wait $guest
    worked $disk
    within 60 "the repository is not full" is_full false
    kill $follower
    works $disk 13 2
    ok one vdi destroy $disk-kept --yes
    within 120 "merged" one_file one $disk
    unplug one
    judged_sound $disk
    destroyed $disk
    held "it goes on when there is space again, and nothing is lost"
}

daemon_is_killed() {
    tell "the daemon is killed"
    local disk=kept guest before
    ok one vdi import $disk $room/golden.raw --sr share --source-format raw
    plug one $disk
    before=$pid
    work $disk 15 100 &
    guest=$!
    kill -KILL "${pids[one]}"
    wait "${pids[one]}" 2>/dev/null
    daemon one
    [ "$(mounts_of one | wc -l)" = 1 ] || fail "not one mount: $(mounts_of one)"
    state one share attached || fail "it is $(field one sr share state)"
    served one
    [ "$pid" = "$before" ] || fail "another process serves the disk"
    ok one vdi snapshot $disk --name $disk-kept
    wait $guest
    worked $disk
    held "a daemon that was killed finds the mount and the disk again, and mounts nothing twice"

    work $disk 15 100 &
    guest=$!
    kill -KILL "${pids[one]}"
    wait "${pids[one]}" 2>/dev/null
    server_stops
    daemon one
    ok promptly 20 sr list
    server_goes_on
    within 120 "the repository is attached" state one share attached
    [ "$(mounts_of one | wc -l)" = 1 ] || fail "not one mount: $(mounts_of one)"
    within 200 "the guest goes on" over $guest
    wait $guest
    worked $disk
    served one
    [ "$pid" = "$before" ] || fail "another process serves the disk"
    ok one vdi destroy $disk-kept --yes
    within 120 "merged" one_file one $disk
    works $disk 15 2
    unplug one
    judged_sound $disk
    destroyed $disk
    held "one that starts while the server is away answers, and has the repository again when that is back"
}

# One of $PARTS.
part() {
    case $1 in
    life) repository_lives ;;
    failures) failures_are_told ;;
    qcow2 | vhd) disk_lives "$1" ;;
    leases) leases_hold ;;
    described) describes_itself ;;
    away) server_goes_away ;;
    full) server_fills ;;
    killed) daemon_is_killed ;;
    esac
}

prepare
for part in $PARTS; do
    case $part in life | failures) part "$part" ;; esac
done
ok one sr create share $(share one)
for part in $PARTS; do
    case $part in life | failures) ;; *) part "$part" ;; esac
done
ok one sr destroy share --yes
nothing_is_left
held "nothing is left"
