# A host for commands that are typed as printed: name spaces in which the directories of Tapline are empty, the programs
# are installed in /usr/local as `make install` does it, and a terminal (tmux) types. A script that needs it does
#
#     . tapline/tests/daemon/bed.sh
#     enter_bed DIRECTORY-OF-PROGRAMS DIRECTORY "$0" "$@"
#     open_terminal COLUMNS 'SHELL'
#
# in the root of the source tree. Mounts, and all that was started, are gone when the script ends, however it ends.

# enter_bed BUILT BED SCRIPT [ARGUMENT…]: runs the script again inside, or ends it with 77 where that cannot be.
enter_bed() {
    built=$1
    bed=$2
    shift 2
    for program in tmux jq qemu-img qemu-system-x86_64; do
        if ! command -v $program >/dev/null; then
            echo "not run: there is no $program (make prepare)"
            exit 77
        fi
    done
    if [ "$(id -u)" != 0 ]; then
        echo 'not run: only root can mount'
        exit 77
    fi
    if [ -z "${IN_NAMESPACE:-}" ]; then
        if ! unshare --mount --propagation private --pid --fork --mount-proc true; then
            echo 'not run: name spaces cannot be created here'
            exit 77
        fi
        exec env IN_NAMESPACE=1 unshare --mount --propagation private --pid --fork --kill-child --mount-proc sh "$@"
    fi
    # Of the host's directories empty ones are seen.
    for directory in /usr/local /var/lib /var/log /run /srv /mnt /etc/tapline /etc/apparmor.d; do
        case "$PWD/ $built/ $bed/" in
        *$directory/*)
            echo "not run: it would hide $directory, in which this checkout is"
            exit 77
            ;;
        esac
        if [ -d $directory ]; then mount -t tmpfs -o mode=755 tmpfs $directory; fi
    done
    mkdir -p "$bed"
    make --no-print-directory --silent install-files BUILT="$built" PREFIX=/usr/local
    PATH=/usr/local/bin:$PATH
}

# open_terminal COLUMNS SHELL: a terminal in which the shell runs, in the directory of the bed.
open_terminal() {
    tmux -S "$bed/tmux" -f /dev/null new-session -d -s bed -x "$1" -y 200 -c "$bed" "$2"
}

screen() { tmux -S "$bed/tmux" capture-pane -p -J -S - -t bed; }
type_in() { tmux -S "$bed/tmux" send-keys -t bed "$@"; }
fail() {
    screen
    echo "FAILED: $*"
    exit 1
}
# see TEXT: waits until it is on the screen.
see() {
    tries=0
    until screen | grep -qF -e "$1"; do
        tries=$((tries + 1))
        [ $tries -lt 1200 ] || fail "not seen: $1"
        sleep 0.1
    done
}
