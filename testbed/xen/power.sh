# What the job `flush` has left, beside steps.sh and storage.sh. Read by the tests that cut the power under it.

# sum_at FILE MIB: of 2 MiB at that offset.
sum_at() {
    set -- $(dd if="$1" bs=1M skip="$2" count=2 2>/dev/null | sha256sum)
    echo "$1"
}

# after_power_loss GUEST NAME FILE: what was flushed is there, what was not is not.
after_power_loss() {
    expect "what $2 tells its guest of its cache" "$(said "$1" "$2-cache")" "write back, fua 0"
    expect "$2: what an fsync made durable" "$(sum_at "$3" 2)" "$(said "$1" "$2-fsync")"
    expect "$2: what O_SYNC made durable" "$(sum_at "$3" 4)" "$(said "$1" "$2-osync")"
    # Otherwise nothing was lost with the power, and this shows nothing.
    [ "$(sum_at "$3" 8)" != "$(said "$1" "$2-unflushed")" ] || fail "$2: what nobody flushed is there"
}
