//! The kernel's data about processes (proc(5)).

use repo::catalogue::Process;
use stats::process_status;

/// The process with this pid. A zombie still has its pid.
pub fn identity(pid: u32) -> Option<Process> {
    started(pid).map(|started| Process { pid, started })
}

/// The start time of a process, in clock ticks after boot (proc_pid_stat(5), field 22).
pub fn started(pid: u32) -> Option<u64> {
    process_status(pid)?.split(' ').nth(19)?.parse().ok()
}
