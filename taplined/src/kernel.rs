//! What the kernel says of processes (proc(5)).

use repo::catalogue::Process;

/// The process with this number; that of one that has ended and was not waited for is still its own.
pub fn identity(pid: u32) -> Option<Process> {
    started(pid).map(|started| Process { pid, started })
}

/// When a process was started, in clock ticks after the boot of the host (proc_pid_stat(5), field 22).
pub fn started(pid: u32) -> Option<u64> {
    stat(pid)?.split(' ').nth(19)?.parse().ok()
}

/// The kernel's status of a process, from field 3 of proc_pid_stat(5) on.
pub fn stat(pid: u32) -> Option<String> {
    stat_in(&format!("/proc/{pid}"))
}

/// The same of a thread.
pub fn stat_of_thread(pid: u32, thread: u32) -> Option<String> {
    stat_in(&format!("/proc/{pid}/task/{thread}"))
}

fn stat_in(directory: &str) -> Option<String> {
    let stat = std::fs::read_to_string(format!("{directory}/stat")).ok()?;
    // The name of the program, in parentheses, is field 2 and may hold anything.
    Some(stat.rsplit_once(") ")?.1.to_owned())
}
