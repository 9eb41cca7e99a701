//! Finds the processes that serve a VBD, by their command lines and users.
//!
//! A disk process has its control socket, in a directory named after the VBD, on its command line, and runs as a disk
//! user. Which of several processes is actually serving is not known here.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use api::{Problem, Transport};
use uuid::Uuid;

use super::owners::Owners;
use super::paths;
use super::process::DiskProcess;
use crate::config::Config;

/// Processes by the VBD that they are meant to serve.
pub type ByVbd = HashMap<Uuid, Vec<DiskProcess>>;

/// All disk processes that are running.
pub fn all(config: &Config) -> Result<ByVbd, Problem> {
    let (places, owners) = (paths::all(config), Owners::of(config)?);
    let tried = |error| Problem::failed("find disk processes in /proc", error);
    let mut found = ByVbd::new();
    for entry in fs::read_dir("/proc").map_err(tried)?.flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        // Most processes are not ours: only for ours is it verified that pid and command line belong together.
        let Ok(words) = fs::read(entry.path().join("cmdline")) else { continue };
        let Some(vbd) = vbd_in(&places, &words) else { continue };
        let is_ours = |words: &[u8]| vbd_in(&places, words) == Some(vbd) && owners.own(pid);
        if let Some(process) = DiskProcess::with_words(pid, is_ours)? {
            found.entry(vbd).or_default().push(process);
        }
    }
    Ok(found)
}

/// The process with this pid, if it is meant to serve the VBD.
pub fn one(config: &Config, vbd: Uuid, pid: u32) -> Result<Option<DiskProcess>, Problem> {
    let (places, owners) = (paths::all(config), Owners::of(config)?);
    DiskProcess::with_words(pid, |words| vbd_in(&places, words) == Some(vbd) && owners.own(pid))
}

/// The relevant parts of a disk process's command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Words {
    /// The protocol it serves.
    pub transport: Transport,
    /// Number of queues.
    pub queues: u16,
    /// Whether it serves the disk read-only.
    pub read_only: bool,
    /// Whether it serves clients of the daemon's NBD address: only for these an export is named.
    pub for_nbd_address: bool,
}

impl Words {
    /// Reads the command line of a process.
    pub fn of(pid: u32) -> Option<Words> {
        Words::in_line(&fs::read(format!("/proc/{pid}/cmdline")).ok()?)
    }

    fn in_line(line: &[u8]) -> Option<Words> {
        let words: Vec<&[u8]> = line.split(|byte| *byte == 0).collect();
        let has = |word: &str| words.contains(&word.as_bytes());
        let transport = match (has("--xen"), has("--nbd")) {
            (true, _) => Transport::Blkif,
            (false, true) => Transport::Nbd,
            (false, false) => Transport::VhostUser,
        };
        let queues = words.iter().skip_while(|word| **word != b"--queues").nth(1);
        let queues = queues.and_then(|word| std::str::from_utf8(word).ok()?.parse().ok())?;
        let (read_only, for_nbd_address) = (has("--read-only"), has("--nbd-export"));
        Some(Words { transport, queues, read_only, for_nbd_address })
    }
}

/// The VBD that a process with this command line serves. Clients of a disk also have its socket on their command line.
fn vbd_in(places: &Path, words: &[u8]) -> Option<Uuid> {
    let mut words = words.split(|byte| *byte == 0).skip_while(|word| *word != b"serve");
    words.find(|word| *word == b"--control")?;
    vbd_of(places, std::str::from_utf8(words.next()?).ok()?)
}

/// The VBD to which a control socket belongs.
fn vbd_of(places: &Path, word: &str) -> Option<Uuid> {
    let within = Path::new(word).strip_prefix(places).ok()?;
    let name = within.parent().filter(|_| within.file_name().is_some_and(|name| name == "control.sock"))?;
    Uuid::parse_str(name.to_str()?).ok()
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn disk_processes_but_not_their_clients_are_recognized() {
        let vbd = Uuid::new_v4();
        let control = format!("/run/tapline/vbd/{vbd}/control.sock");
        let of = |words: &str| vbd_in(Path::new("/run/tapline/vbd"), words.replace(' ', "\0").as_bytes());
        assert_eq!(of(&format!("/bin/tapline-disk serve raw:/a --nbd /x --control {control} --handed ")), Some(vbd));
        assert_eq!(of(&format!("sh tapline-disk serve raw:/a --control {control}")), Some(vbd));
        for other in [
            format!("tapline disk {control} watch"),
            format!("tapline-disk serve raw:/a --nbd {control}"),
            format!("tapline-disk serve raw:/a --control /run/tapline/vbd/{vbd}/nbd.sock"),
            "tapline-disk serve raw:/a --control /run/tapline/vbd/x/control.sock".into(),
            "tapline-disk serve raw:/a --control /run/other/control.sock".into(),
            "tapline-disk serve raw:/a --control".into(),
            String::new(),
        ] {
            assert_eq!(of(&other), None, "{other}");
        }
    }

    #[test]
    fn a_process_is_described_by_its_command_line() {
        let of = |line: &str| Words::in_line(line.replace(' ', "\0").as_bytes());
        let nbd = Words { transport: Transport::Nbd, queues: 1, read_only: true, for_nbd_address: false };
        assert_eq!(
            of("tapline-disk serve raw:/a --nbd /x --control /y --queues 1 --handed --read-only"),
            Some(nbd.clone())
        );
        let line = "tapline-disk serve raw:/a --nbd /x --nbd-export y --control /y --queues 1 --handed --read-only";
        assert_eq!(of(line), Some(Words { for_nbd_address: true, ..nbd }));
        let vhost = Words { transport: Transport::VhostUser, queues: 4, read_only: false, for_nbd_address: false };
        assert_eq!(of("tapline-disk serve raw:/a --vhost-user /x --control /y --queues 4"), Some(vhost));
        assert_eq!(
            of("tapline-disk serve raw:/a --xen 1/xvda --control /y --queues 2").unwrap().transport,
            Transport::Blkif
        );
        assert_eq!(of("tapline-disk serve raw:/a --nbd /x"), None);
    }

    #[tokio::test]
    async fn all_processes_of_a_vbd_are_found_and_no_others() {
        let room = tempfile::tempdir().unwrap();
        let config = Config { run_directory: room.path().to_owned(), ..Config::default() };
        let (vbd, other) = (Uuid::new_v4(), Uuid::new_v4());
        let sleeper = |vbd: Uuid| {
            let control = paths::DiskPaths::of(&config, vbd).control();
            let mut command = std::process::Command::new("sh");
            command.args(["-c", "read word", "disk", "serve", "--control"]).arg(control);
            command.stdin(std::process::Stdio::piped()).spawn().unwrap()
        };
        let mut children = [sleeper(vbd), sleeper(vbd), sleeper(other)];
        let of = |found: &ByVbd, vbd: Uuid| {
            let mut pids: Vec<u32> = found[&vbd].iter().map(|process| process.identity().pid).collect();
            pids.sort_unstable();
            pids
        };
        let mut expected = vec![children[0].id(), children[1].id()];
        expected.sort_unstable();
        // Until it executes another program, a child has our command line.
        let found = loop {
            let found = all(&config).unwrap();
            if found.values().map(Vec::len).sum::<usize>() == children.len() {
                break found;
            }
        };
        assert_eq!((of(&found, vbd), of(&found, other)), (expected, vec![children[2].id()]));
        assert!(one(&config, vbd, children[0].id()).unwrap().is_some());
        assert!(one(&config, other, children[0].id()).unwrap().is_none());
        for child in &mut children {
            child.kill().unwrap();
            child.wait().unwrap();
        }
        assert!(all(&config).unwrap().is_empty());
    }
}
