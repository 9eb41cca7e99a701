//! Figures of a process from /proc: memory, waits and CPU time.

use std::path::Path;

/// The number of voluntary context switches of all threads of a process.
pub fn switches(pid: u32) -> Result<u64, String> {
    let tasks = Path::new("/proc").join(pid.to_string()).join("task");
    let mut switches = 0;
    for task in std::fs::read_dir(tasks).map_err(|error| error.to_string())? {
        let task = task.map_err(|error| error.to_string())?;
        switches += field(&task.path().join("status"), "voluntary_ctxt_switches:")?;
    }
    Ok(switches)
}

/// The proportional memory (PSS) of a process in KiB.
pub fn pss_kib(pid: u32) -> Result<u64, String> {
    field(&Path::new("/proc").join(pid.to_string()).join("smaps_rollup"), "Pss:")
}

/// User and system time of all threads of a process in seconds.
pub fn cpu_seconds(pid: u32) -> Result<f64, String> {
    let path = format!("/proc/{pid}/stat");
    let stat = std::fs::read_to_string(&path).map_err(|error| format!("{path}: {error}"))?;
    // The name in parentheses may contain spaces; utime and stime are fields 14 and 15.
    let fields: Vec<&str> = stat.rsplit(") ").next().unwrap_or_default().split(' ').collect();
    let ticks = |at: usize| fields.get(at).and_then(|field| field.parse::<f64>().ok()).unwrap_or(0.0);
    // USER_HZ is 100 on all supported architectures.
    Ok((ticks(11) + ticks(12)) / 100.0)
}

/// The number after `name` in a file of /proc.
fn field(path: &Path, name: &str) -> Result<u64, String> {
    let text = std::fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))?;
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    line.and_then(|rest| rest.split_whitespace().next()?.parse().ok()).ok_or(format!("{}: no {name}", path.display()))
}
