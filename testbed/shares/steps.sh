# What the tests are made of. Read before the server's own; every step ends the guest when it fails.

# Where the server's files are, on a disk of its own.
srv=/srv

say() { printf '\rTAPLINE %s\n' "$*"; }

power_off() {
    sleep 0.3
    busybox poweroff -f
    sleep 60
}

# What is left of the daemons' and the kernel's words goes to the console.
fail() {
    for who in one other; do
        [ ! -e /tmp/$who.log ] || { echo "--- taplined of $who"; tail -n 40 /tmp/$who.log; }
    done
    echo "--- kernel"
    dmesg | tail -n 30
    echo "--- mounts"
    grep -E ' - (nfs|cifs)' /proc/self/mountinfo
    server_words
    say "fail=$*"
    power_off
}

tell() { say "doing=$*"; }

# A claim that was looked at and held.
held() { say "held=$SHARE: $*"; }

# seconds: since the boot, whole.
seconds() {
    read -r up _ </proc/uptime
    echo "${up%.*}"
}

# within SECONDS WHAT COMMAND...: it is so in that time.
within() {
    local limit=$1 what=$2 begun
    shift 2
    begun=$(seconds)
    until "$@"; do
        [ $(($(seconds) - begun)) -le "$limit" ] || fail "not in $limit s: $what"
        sleep 0.2
    done
}

# host NAME NUMBER: a host at 10.0.NUMBER.2, to which the server is 10.0.NUMBER.1.
host() {
    ip netns add "$1"
    ip link add "to-$1" type veth peer name eth0 netns "$1" || fail "a network for $1"
    ip address add "10.0.$2.1/24" dev "to-$1"
    ip link set "to-$1" up
    ip netns exec "$1" sh -c "ip link set lo up; ip address add 10.0.$2.2/24 dev eth0; ip link set eth0 up
        [ ! -e /sys/fs/nfs/net/nfs_client/identifier ] || echo $1 >/sys/fs/nfs/net/nfs_client/identifier"
}

# daemon NAME: starts the daemon of a host, and waits until it listens.
daemon() {
    local who=$1
    [ -e /tmp/"$who".toml ] || cat >/tmp/"$who".toml <<SETTINGS
state-directory = "/var/lib/tapline-$who"
run-directory = "/run/$who"
log-directory = "/var/log/tapline-$who"
disk-program = "/drop/tapline-disk"
[storage]
answer-timeout = $ANSWER
lost-interval = 5
measure-interval = 5
full-interval = 2
SETTINGS
    nsenter --net=/run/netns/"$who" -- taplined --config /tmp/"$who".toml >>/tmp/"$who".log 2>&1 &
    pids[$who]=$!
    within 60 "the daemon of $who listens" on "$who" host show >/dev/null 2>&1
}

declare -A pids

# on HOST WORDS...: tapline's words to the daemon of a host.
on() {
    local who=$1
    shift
    TAPLINE_SOCKET=/run/$who/taplined.sock tapline "$@"
}
one() { on one "$@"; }
other() { on other "$@"; }

# ok COMMAND...: it must work.
ok() { "$@" >/tmp/said 2>&1 || fail "$*: $(cat /tmp/said)"; }

# refused TEXT COMMAND...: it must not, in bounded time, and what it says must have TEXT (an extended regular expression).
refused() {
    local text=$1 begun
    shift
    begun=$(seconds)
    if "$@" >/tmp/said 2>&1; then fail "$*: was not refused: $(cat /tmp/said)"; fi
    took=$(($(seconds) - begun))
    grep -Eqi -- "$text" /tmp/said || fail "$*: refused otherwise: $(cat /tmp/said)"
    [ $took -le $((ANSWER + 12)) ] || fail "$*: refused only after $took s"
}

# said: what the last one said, in a line.
said() { tr '\n' ' ' </tmp/said; }

# field HOST NOUN NAME PATH: of an object as JSON.
field() { on "$1" "$2" show "$3" --json | jq -r ".$4"; }

# mounts_of HOST: the lines of what its daemon has mounted.
mounts_of() { grep " /run/$1/sr/" /proc/self/mountinfo; }
nothing_mounted() { ! mounts_of "$1" >/dev/null; }

# plug HOST VDI: makes a VBD and plugs it; `vbd`, `socket` and `pid` are its.
plug() {
    ok on "$1" vbd create --vdi "$2" --json
    vbd=$(on "$1" vbd list --vdi "$2" --json | jq -r '.[0].uuid')
    ok on "$1" vbd plug "$vbd"
    served "$1"
}
served() {
    socket=$(field "$1" vbd "$vbd" socket)
    pid=$(field "$1" vbd "$vbd" pid)
    [ -S "$socket" ] || fail "the VBD $vbd has no socket: $(on "$1" vbd show "$vbd")"
}

unplug() {
    ok on "$1" vbd unplug "$vbd"
    ok on "$1" vbd destroy "$vbd"
}

# work MEMORY SEED ROUNDS: looks at all that the disk must hold, writes to it, and looks again.
work() {
    jq -n --arg s "$socket" --argjson p "$pid" --arg m "/tmp/$1.memory" --argjson seed "$2" --argjson rounds "$3" \
        '{rounds: $rounds, blocks: 24, disks: [{socket: $s, pid: $p, memory: $m, seed: $seed, marker: null}]}' |
        bench-guest >"/tmp/$1.outcome" 2>&1
}
worked() {
    grep -q '"outcome":"done"' "/tmp/$1.outcome" || fail "the guest of $1: $(cat "/tmp/$1.outcome")"
}
works() {
    work "$@"
    worked "$1"
}

one_file() { [ "$(field "$1" vdi "$2" depth)" = 1 ]; }
