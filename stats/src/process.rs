//! What the kernel knows of a process (proc_pid_stat(5)).

/// The status of a process, from field 3 on, which is its state: `T` if it is stopped by a signal, `t` if by a
/// debugger. `None` if there is no such process.
pub fn process_status(pid: u32) -> Option<String> {
    status_in(&format!("/proc/{pid}"))
}

/// The status of a thread of a process, from field 3 on.
pub fn thread_status(pid: u32, thread: u32) -> Option<String> {
    status_in(&format!("/proc/{pid}/task/{thread}"))
}

/// Whether a process is stopped, by a signal or a debugger.
pub fn is_stopped(pid: u32) -> bool {
    process_status(pid).is_some_and(|status| status.starts_with(['T', 't']))
}

fn status_in(directory: &str) -> Option<String> {
    let stat = std::fs::read_to_string(format!("{directory}/stat")).ok()?;
    // The name of the program, in parentheses, is field 2 and may hold anything.
    Some(stat.rsplit_once(") ")?.1.to_owned())
}
