//! What the kernel says of processes (proc(5)).

use repo::catalogue::Process;
use stats::process_status;

/// The process with this number; that of one that has ended and was not waited for is still its own.
pub fn identity(pid: u32) -> Option<Process> {
    started(pid).map(|started| Process { pid, started })
}

/// When a process was started, in clock ticks after the boot of the host (proc_pid_stat(5), field 22).
pub fn started(pid: u32) -> Option<u64> {
    process_status(pid)?.split(' ').nth(19)?.parse().ok()
}
