//! Where the process runs: `serve --cpus` and `--numa-node`. Done first of all, so that threads that are started later,
//! and memory that is touched later, are where they should be. A process that takes over is started by the one that it
//! replaces, or by the daemon, and is placed by its own command line.
//!
//! It knows nothing about disks. Invariant: either the whole placement is in effect, or there is an error.

use std::io;
use std::path::Path;

use arguments::Serve;
use control::{CpuList, Kind};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::process::failure::Failure;

/// The kernel's directory of NUMA nodes; missing on kernels without NUMA.
const NODES: &str = "/sys/devices/system/node";

/// Places this process as the command line says.
pub fn place(serve: &Serve) -> Result<(), Failure> {
    if let Some(node) = serve.numa_node {
        let cpus = cpus_of(Path::new(NODES), node)?;
        prefer(node)?;
        // A node may have only memory.
        if let (None, Some(cpus)) = (&serve.cpus, &cpus) {
            run_on(cpus)?;
        }
    }
    serve.cpus.as_ref().map_or(Ok(()), run_on)
}

/// Returns the processors of a node, or `None` if it has only memory.
fn cpus_of(nodes: &Path, node: u32) -> Result<Option<CpuList>, Failure> {
    let what = format!("use NUMA node {node}");
    let invalid = |why: String| Failure::new(&what, why).of_kind(Kind::Invalid);
    let online = std::fs::read_to_string(nodes.join("online"));
    let online =
        online.map_err(|_| invalid("this machine's kernel has no NUMA".into()).advise("leave --numa-node out"))?;
    match std::fs::read_to_string(nodes.join(format!("node{node}/cpulist"))) {
        Ok(text) => Ok(text.trim().parse().ok()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            Err(invalid(format!("there is none: this machine has node {}", online.trim())))
        }
        Err(error) => Err(Failure::failed(format!("read the processors of NUMA node {node}"), &error)),
    }
}

fn prefer(node: u32) -> Result<(), Failure> {
    memory::prefer_numa_node(node).map_err(|error| {
        let failure = Failure::failed(format!("prefer the memory of NUMA node {node}"), &error);
        match error.kind() {
            io::ErrorKind::PermissionDenied => {
                failure.advise("this container may not call set_mempolicy: allow it, or use --cpus alone")
            }
            _ => failure,
        }
    })
}

fn run_on(cpus: &CpuList) -> Result<(), Failure> {
    let what = format!("run on the processors {cpus}");
    let mut set = CpuSet::new();
    cpus.numbers().for_each(|number| set.set(number));
    let before = sched_getaffinity(None).map_err(|errno| Failure::failed(&what, &errno.into()))?;
    let numbers = |set: &CpuSet| CpuList::of((0..CpuSet::MAX_CPU).filter(|number| set.is_set(*number)));
    let of_these = |refused: Option<CpuList>| {
        let (refused, allowed) = (refused.map(|list| list.to_string()), numbers(&before).map(|list| list.to_string()));
        let why = format!(
            "{} is not there, or this process may not use it; it may use {}",
            refused.unwrap_or_default(),
            allowed.unwrap_or_default()
        );
        Failure::new(&what, why).of_kind(Kind::Invalid)
    };
    match sched_setaffinity(None, &set) {
        Ok(()) => {}
        // Fails so if none of them exists.
        Err(rustix::io::Errno::INVAL) => return Err(of_these(Some(cpus.clone()))),
        Err(errno) => return Err(Failure::failed(&what, &errno.into())),
    }
    // The kernel accepts a set of which only some exist.
    let now = sched_getaffinity(None).map_err(|errno| Failure::failed(&what, &errno.into()))?;
    match CpuList::of(cpus.numbers().filter(|number| !now.is_set(*number))) {
        None => Ok(()),
        missing => Err(of_these(missing)),
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_node_that_is_not_there_is_named_with_those_that_are() {
        let nodes = tempfile::tempdir().unwrap();
        let why = cpus_of(&nodes.path().join("none"), 0).unwrap_err().to_string();
        assert!(why.starts_with("cannot use NUMA node 0: this machine's kernel has no NUMA"), "{why}");
        std::fs::write(nodes.path().join("online"), "0-1\n").unwrap();
        for (node, text) in [("node0", "0-3,8\n"), ("node1", "\n")] {
            std::fs::create_dir(nodes.path().join(node)).unwrap();
            std::fs::write(nodes.path().join(node).join("cpulist"), text).unwrap();
        }
        assert_eq!(cpus_of(nodes.path(), 0).unwrap(), Some("0-3,8".parse().unwrap()));
        assert_eq!(cpus_of(nodes.path(), 1).unwrap(), None, "a node with memory alone");
        let why = cpus_of(nodes.path(), 2).unwrap_err();
        assert_eq!(why.to_string(), "cannot use NUMA node 2: there is none: this machine has node 0-1");
    }
}
