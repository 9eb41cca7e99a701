# What tests about the life of our disks are made of, beside steps.sh: who serves a disk, how often a guest was told, and what
# is left of a disk that has gone. Read by those tests themselves.

tapline=/drop/tapline

# number_of NAME: of a disk, as the store has it; xvda to xvdo.
number_of() {
    letter=$(printf %d "'${1#xvd}")
    echo $((51712 + (letter - 97) * 16))
}

# end_of GUEST NAME: the node of our end. The test's disks are below $kind.
kind=tapline
end_of() { echo "/local/domain/0/backend/$kind/$(xl domid "$1")/$(number_of "$2")"; }

# server_of GUEST NAME: the number of the process that serves a disk.
server_of() { xenstore-read "$(end_of "$1" "$2")/tapline/pid" || fail "nobody serves $2 of $1"; }

# attach GUEST IMAGE NAME WORDS...: a disk that its guest has found.
attach() {
    name=$1-$3
    guest=$1
    image=$2
    vdev=$3
    shift 3
    $tapline xen attach "$guest" "$image" --vdev "$vdev" --log "/out/serve-$name.log" --wait "$@" || fail "attach $vdev"
}

# A group of processes whose I/O is slow, once its io.max says so.
slow_group() {
    mkdir -p /cgroup
    mount -t cgroup2 cgroup /cgroup || fail "cgroups"
    echo +io >/cgroup/cgroup.subtree_control || fail "no control of I/O"
    mkdir /cgroup/slow
}

# refused CODE WORDS COMMAND...: the command ends with that code, and says the words.
refused() {
    code=$1
    words=$2
    shift 2
    "$@" >/tmp/refused 2>&1
    was=$?
    cat /tmp/refused >>/out/refused
    [ $was = "$code" ] || { cat /tmp/refused; fail "'$*' ended with $was and not with $code"; }
    grep -q -e "$words" /tmp/refused || { cat /tmp/refused; fail "'$*' does not say '$words'"; }
}

# rounds GUEST: how many its job has said.
rounds() {
    last=$(said "$1" round)
    echo "${last:-0}"
}

# goes_on GUEST: its job gets through more than one more round.
goes_on() { wait_said "$1" "round=$(($(rounds "$1") + 2))" 120; }

# kill_server GUEST NAME: the process of a disk is killed; /tmp/words are what it was started with.
kill_server() {
    pid=$(server_of "$1" "$2")
    cat "/proc/$pid/cmdline" >/tmp/words
    kill -9 "$pid" || fail "the process of $2 is gone already"
}

# follow GUEST NAME: another one comes with the same words, as docs/xen.md says.
follow() {
    node=$(end_of "$1" "$2")
    xargs -0 setsid </tmp/words >>"/out/serve-$1-$2.log" 2>&1 &
    left=200
    while now=$(xenstore-read "$node/tapline/pid"); [ "$now" = "$pid" ]; do
        [ $left -gt 0 ] || fail "nobody follows on $2"
        left=$((left - 1))
        sleep 0.1
    done
}

# wait_dead PID SECONDS
wait_dead() {
    left=$(($2 * 10))
    while [ -d "/proc/$1" ]; do
        [ "$left" -gt 0 ] || fail "the process $1 does not end"
        left=$((left - 1))
        sleep 0.1
    done
}

# holdings PID: descriptors, mappings of guests' pages, and event channels of dom0 to guests.
holdings() {
    set -- "$(find "/proc/$1/fd" -type l | wc -l)" "$(grep -c xen/gntdev "/proc/$1/maps")" "$("$lsevtchn" 0 | grep -c 'Remote Domain [1-9]')"
    echo "fds=$1 mappings=$2 channels=$3"
}
lsevtchn=$(echo /usr/lib/xen-4.*/bin/lsevtchn)

# granted DOMID: how many pages of the domain others hold just now.
granted() {
    xl dmesg -c >/dev/null
    xl debug-keys g
    # The lines of active grants are those that begin with a reference in brackets.
    xl dmesg | tee -a /out/grants | awk -v domain="$1" '
        /grant-table for remote d/ { within = $0 ~ ("remote d" domain "[ ^]") || $0 ~ ("remote d" domain "$") }
        within && /^\(XEN\) *\[ *0x[0-9a-f]+\]/ { n++ }
        END { print n + 0 }'
}

# nothing_left: no disk of ours, and no domain but dom0, has left anything.
nothing_left() {
    left=100
    while [ "$(xl list | wc -l)" -gt 2 ]; do
        [ $left -gt 0 ] || { xl list; fail "a domain is left"; }
        left=$((left - 1))
        sleep 0.2
    done
    nodes=$(xenstore-ls -f /local/domain/0/backend 2>/dev/null | grep "/backend/$kind/[0-9]")
    [ -z "$nodes" ] || fail "nodes are left: $nodes"
    left=50
    while pids=$(pidof tapline-disk); do
        [ $left -gt 0 ] || fail "processes are left: $pids"
        left=$((left - 1))
        sleep 0.2
    done
    locks=$(grep OFDLCK /proc/locks)
    [ -z "$locks" ] || fail "an image is locked: $locks"
    ! find /run/tapline -name '*.pid' -o -name '*.sock' 2>/dev/null | grep . || fail "files are left in /run/tapline"
    stats=$(find /dev/shm -name 'vbd3-*' -o -name 'td3-*')
    [ -z "$stats" ] || fail "statistics are left: $stats"
    channels=$("$lsevtchn" 0 | grep -c 'Remote Domain [1-9]')
    expect "event channels to guests" "$channels" 0
}

# xl_names_disks: of the guests that follow it makes $disks, by our block script; after a reboot it does with them what
# $on_reboot says.
xl_names_disks() {
    cp /drop/block-tapline /etc/xen/scripts/block-tapline || fail "no block-tapline"
    ln -s /drop/tapline /drop/tapline-disk /usr/sbin/ || fail "no place in the PATH of xl"
    # The last word of a configuration counts.
    at_start() {
        echo "disk=[$disks]"
        echo "on_reboot='${on_reboot:-destroy}'"
    }
}

# named DISK VDEV ACCESS: as xl's configuration names it.
named() { echo "vdev=$2,access=$3,script=block-tapline,target=raw:$1"; }

# no_disk DOMID NAME: neither end of it, nor xl's own node, is in the store.
no_disk() {
    for node in "/local/domain/$1/device/vbd/" "/local/domain/0/backend/$kind/$1/" "/local/domain/0/backend/vbd/$1/" "/libxl/$1/device/vbd/"; do
        ! xenstore-ls "$node$(number_of "$2")" 2>/dev/null || fail "$node$(number_of "$2") is left"
    done
    ! find /run/tapline /dev/shm 2>/dev/null | grep -e "-$1-$2" -e "-$1-$(number_of "$2")" || fail "files of $2 are left"
}

# no_xl_nodes: xl has forgotten all guests' disks.
no_xl_nodes() {
    nodes=$(xenstore-ls -f /libxl | grep '/device/vbd/'; xenstore-ls -f /local/domain/0/backend | grep '/backend/vbd/[0-9]')
    [ -z "$nodes" ] || fail "xl's nodes are left: $nodes"
}

# soon WHAT SECONDS COMMAND...: the command comes to succeed.
soon() {
    what=$1
    left=$(($2 * 10))
    shift 2
    until "$@"; do
        if grep -aqs "TAPLINE fail=" /var/log/xen/console/guest-*.log || [ $left -le 0 ]; then
            tail -n 20 /var/log/xen/console/guest-*.log
            fail "no $what"
        fi
        left=$((left - 1))
        sleep 0.1
    done
}

has_said() { grep -aq "TAPLINE $2" "$(console_of "$1")"; }

state_is() { [ "$(xenstore-read "$1/state" 2>/dev/null)" = "$2" ]; }

# memory_of PID: kB that it has to itself.
memory_of() { awk '/^Rss/ { print $2 }' "/proc/$1/smaps_rollup"; }

no_process() { ! pidof tapline-disk >/dev/null; }

# guest_paused NAME: one that never runs, in little memory.
guest_paused() {
    {
        echo "name='$1'"
        echo "type='$guest_type'"
        echo "memory=96"
        echo "kernel='/guest/vmlinux'"
        echo "on_poweroff='destroy'"
    } >"/tmp/paused-$1"
    xl create -q -p "/tmp/paused-$1" || fail "xl create $1"
}

# left_over DOMID NAME: detach removes what an attach has made for a domain that was gone meanwhile.
left_over() {
    if xenstore-ls "/local/domain/0/backend/tapline/$1" >/dev/null 2>&1 || xenstore-ls "/local/domain/$1" >/dev/null 2>&1; then
        xenstore-ls "/local/domain/0/backend/tapline/$1"
        echo "left over for $1 $2"
        $tapline xen detach "$1" "$2" --force || fail "detach of what is left over"
    fi
}

is_gone() { ! xenstore-read "$1/state" >/dev/null 2>&1; }
