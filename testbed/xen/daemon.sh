# What tests of the daemon are made of, beside life.sh: the daemon itself, a VM with the driver xen and its first disk. Read by those
# tests themselves.

# `tapline` draws its progress where it sees a terminal, and leaves lines without an end there.
exec 2>>/out/stderr

images 128
mkdir /images/sr /images/out
# Debian's installer would have made it.
grep -q '^nobody:' /etc/passwd || echo 'nobody:x:65534:65534::/:/bin/false' >>/etc/passwd
printf 'log-directory = "/out/tapline"\n[plug]\nstep-timeout = 60\n' >/tmp/taplined.toml

daemon_up() { $tapline host show >/dev/null 2>&1; }

# start_daemon [VARIABLE=VALUE]
start_daemon() {
    env "$@" setsid /drop/taplined --config /tmp/taplined.toml 2>>/out/taplined.log &
    daemon=$!
    soon "daemon" 30 daemon_up
}

stop_daemon() {
    kill "$daemon"
    wait_dead "$daemon" 30
    rm -f /run/tapline/taplined.sock
}

# done_by WHAT WORDS...: of `tapline`.
done_by() {
    what=$1
    shift
    $tapline "$@" || fail "$what"
}

# vm_is POWER
vm_is() { [ "$($tapline vm list "$vm" --json | sed -n 's/.*"power": *"\([a-z]*\)".*/\1/p')" = "$1" ]; }

served_by_another() { now=$(server_of "$vm" xvda) && [ "$now" != "$pid" ] && [ -d "/proc/$now" ]; }

# start_vm: until its guest has written and read back what it wrote.
start_vm() {
    : >"$(console_of "$vm")"
    done_by "start" vm start guest
    wait_said "$vm" round=1 300
}

start_daemon _=
done_by "an SR" sr create local --dir /images/sr
vdi=$($tapline vdi create disk --sr local --size 8M) || fail "a VDI"
initrd_of daemon daemon ""
vm=$($tapline vm create guest --driver xen --memory "${guest_memory:-320}M" --kernel /guest/vmlinux --initrd "$place/initrd" \
    --cmdline "$(guest_words)" --platform tsc_mode=native --platform "type=$guest_type") || fail "a VM"
vbd=$($tapline vbd create --vm "$vm" --vdi "$vdi") || fail "a VBD"
