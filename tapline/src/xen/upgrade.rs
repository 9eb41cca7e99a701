//! Replaces a disk's process while its guest runs.
//!
//! The old process completes the requests that it has accepted and exits; the new one has its arguments, finds the
//! guest connected and takes over its rings. Meanwhile the guest waits. Invariants: the new process gets the current
//! chain of layers, whatever the old one was started with; and the old process is only stopped if the new one can be
//! started, so an unknown image or command line leaves it untouched.

use std::convert::Infallible;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use clap::Parser;
use control::{Error, ImageName};
use rustix::process::{Pid, Signal};
use xen::Store;

use super::launch::Launch;
use crate::disk;
use arguments::{Arguments, Command, Serve};
use vm::xen::claim::{Holder, Places};
use vm::xen::device::Device;
use vm::xen::{domain, take};

use super::arguments::Upgrade;
use super::say;

/// A running disk process: its arguments and files.
struct RunningProcess {
    words: Vec<OsString>,
    serve: Serve,
    directory: PathBuf,
    log: PathBuf,
}

/// Runs `xen upgrade`.
pub fn upgrade(store: &mut dyn Store, places: &Places, words: &Upgrade) -> Result<(), Error> {
    let own = domain::own(store)?;
    let guest = domain::find(store, &words.domain)?;
    let device = take::find(store, own, guest, words.vdev)?;
    take::refuse_kept(store, &device, "replace the process of")?;
    let tried = || format!("replace the process of {device}");
    let Some(holder) = Holder::of(places, &device)? else {
        return Err(Error::cannot(tried(), "there is none").advise(format!(
            "start one: tapline serve IMAGE --xen {guest}/{} --xen-backend {}",
            device.vdev, device.kind
        )));
    };
    let process = RunningProcess::of(holder.pid, places, &device)?;
    let chain = process.chain(words)?;
    let new_words = process.words_for(&chain)?;
    let program = super::program()?;
    let launch =
        Launch { program, words: new_words, directory: Some(process.directory.clone()), log: process.log.clone() };

    let pid = holder.pid.as_raw_nonzero();
    if !holder.end(Signal::USR2, words.timeout)? {
        let why = format!("process {pid} has not exited in {} s", words.timeout.as_secs());
        return Err(Error::cannot(tried(), why).advise(format!(
            "it will exit when its storage responds; then serve the disk again: {}",
            manual_command(&launch)
        )));
    }
    let mut launched = launch.start().map_err(|failure| with_manual_start(failure, &launch))?;
    launched.wait_taken_over(store, &device, words.timeout).map_err(|failure| with_manual_start(failure, &launch))?;
    say(format_args!("{device} is now served by process {}, which replaced process {pid}", launched.pid()));
    say(format_args!("its log is {}", process.log.display()));
    Ok(())
}

impl RunningProcess {
    fn of(pid: Pid, places: &Places, device: &Device) -> Result<RunningProcess, Error> {
        let place = PathBuf::from(format!("/proc/{}", pid.as_raw_nonzero()));
        let failed = |what: &str| {
            let tried = format!("read {what} of process {}, which serves {device}", pid.as_raw_nonzero());
            move |error: io::Error| Error::cannot(tried, error)
        };
        let line = fs::read(place.join("cmdline")).map_err(failed("the command line"))?;
        let directory = fs::read_link(place.join("cwd")).map_err(failed("the working directory"))?;
        let stderr = fs::read_link(place.join("fd/2")).map_err(failed("the log"))?;
        let log = match stderr.is_file() {
            true => stderr,
            false => places.log(device),
        };
        let (words, serve) = parse_command_line(&line).ok_or_else(|| {
            let why = format!("process {} was not started by `tapline serve … --xen`", pid.as_raw_nonzero());
            Error::cannot(format!("replace the process of {device}"), why)
        })?;
        Ok(RunningProcess { words, serve, directory, log })
    }

    /// The current layers: snapshots and merges may have changed them. Without a control socket they cannot have
    /// changed.
    fn chain(&self, words: &Upgrade) -> Result<Vec<ImageName>, Error> {
        match &self.serve.control {
            Some(control) => disk::layers(&self.directory.join(control), words.timeout),
            None => Ok(self.named().collect()),
        }
    }

    /// The layers in its arguments, with absolute paths.
    fn named(&self) -> impl Iterator<Item = ImageName> {
        let names = std::iter::once(&self.serve.image).chain(&self.serve.parents.names);
        names.map(|name| {
            let Ok(whole) = name.map_paths(|path| Ok::<_, Infallible>(self.directory.join(path)));
            whole
        })
    }

    /// Its arguments, with the layers replaced by this chain.
    fn words_for(&self, chain: &[ImageName]) -> Result<Vec<OsString>, Error> {
        if self.named().eq(chain.iter().cloned()) {
            return Ok(self.words.clone());
        }
        let words = with_chain(&self.words, &self.serve.image, chain);
        // The arguments are not ours: check that the changed ones have the intended meaning.
        let means = words.as_deref().and_then(parse_serve).filter(|serve| {
            std::iter::once(&serve.image).chain(&serve.parents.names).eq(chain) && serve.xen == self.serve.xen
        });
        words.filter(|_| means.is_some()).ok_or_else(|| {
            let chain: Vec<String> = chain.iter().map(ImageName::to_string).collect();
            Error::cannot("put the disk's current layers into its process's command line", chain.join(" "))
                .advise("stop it with SIGUSR2, and serve these layers by hand")
        })
    }
}

/// Parses a command line into the arguments after the program's name and their meaning; `None` if it does not serve a
/// Xen guest.
fn parse_command_line(line: &[u8]) -> Option<(Vec<OsString>, Serve)> {
    let line = line.strip_suffix(b"\0").unwrap_or(line);
    let words: Vec<OsString> =
        line.split(|&byte| byte == 0).skip(1).map(|word| OsStr::from_bytes(word).into()).collect();
    let serve = parse_serve(&words).filter(|serve| serve.xen.is_some())?;
    Some((words, serve))
}

fn parse_serve(words: &[OsString]) -> Option<Serve> {
    let all = std::iter::once(OsString::from("tapline")).chain(words.iter().cloned());
    match Arguments::try_parse_from(all).ok()?.command {
        Command::Serve(serve) => Some(serve),
        _ => None,
    }
}

/// Replaces the image and its parents in the arguments by the layers of `chain`.
fn with_chain(words: &[OsString], image: &ImageName, chain: &[ImageName]) -> Option<Vec<OsString>> {
    let (leaf, parents) = chain.split_first()?;
    let mut result = Vec::new();
    let mut rest = words.iter();
    while let Some(word) = rest.next() {
        if word == "--parent" {
            rest.next()?;
        } else if word.as_bytes().starts_with(b"--parent=") {
            // Omitted: the layer is no longer part of the chain, or has moved.
        } else if *word == image.word() {
            result.push(leaf.word());
            result.extend(parents.iter().flat_map(|parent| [OsString::from("--parent"), parent.word()]));
        } else {
            result.push(word.clone());
        }
    }
    Some(result)
}

/// Adds to a failure that the guest's I/O waits, and the command that continues it.
fn with_manual_start(failure: Error, launch: &Launch) -> Error {
    let advice = format!("the guest's I/O waits until its disk is served again: {}", manual_command(launch));
    failure.advise(advice)
}

/// The shell command that starts the process by hand.
fn manual_command(launch: &Launch) -> String {
    let quoted = |word: &OsStr| {
        let word = word.to_string_lossy();
        let plain = word.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_./:=,+".contains(&byte));
        if plain { word.into_owned() } else { format!("'{}'", word.replace('\'', r"'\''")) }
    };
    let directory = launch.directory.as_deref().unwrap_or(Path::new("."));
    let words: Vec<String> = launch.words.iter().map(|word| quoted(word)).collect();
    let (program, log) = (quoted(launch.program.as_os_str()), quoted(launch.log.as_os_str()));
    format!("(cd {} && setsid {program} {} </dev/null 2>>{log} &)", quoted(directory.as_os_str()), words.join(" "))
}

#[cfg(test)]
mod test {
    use super::*;

    fn process(line: &str) -> RunningProcess {
        let (words, serve) = parse_command_line(line.replace(' ', "\0").as_bytes()).unwrap();
        RunningProcess { words, serve, directory: "/srv".into(), log: "/x.log".into() }
    }

    fn chain(names: &[&str]) -> Vec<ImageName> {
        names.iter().map(|name| name.parse().unwrap()).collect()
    }

    fn joined(words: &[OsString]) -> String {
        words.join(OsStr::new(" ")).into_string().unwrap()
    }

    const LINE: &str =
        "/usr/bin/tapline-disk serve vhd:/b.vhd --parent vhd:a.vhd --xen 7/xvdb --control /run/c.sock --queues 2";

    #[test]
    fn an_unchanged_chain_keeps_the_arguments() {
        let process = process(LINE);
        let words = process.words_for(&chain(&["vhd:/b.vhd", "vhd:/srv/a.vhd"])).unwrap();
        assert_eq!(joined(&words), LINE.split_once(' ').unwrap().1);
    }

    #[test]
    fn a_changed_chain_is_updated_in_the_arguments() {
        let words = process(LINE).words_for(&chain(&["qcow2:/c.qcow2", "vhd:/b.vhd", "vhd:/srv/a.vhd"])).unwrap();
        let expected = "serve qcow2:/c.qcow2 --parent vhd:/b.vhd --parent vhd:/srv/a.vhd --xen 7/xvdb \
                        --control /run/c.sock --queues 2";
        assert_eq!(joined(&words), expected);
        let merged = process("t serve raw:b --parent=raw:a --xen 7/xvdb").words_for(&chain(&["raw:/srv/a"])).unwrap();
        assert_eq!(joined(&merged), "serve raw:/srv/a --xen 7/xvdb");
    }

    #[test]
    fn arguments_that_cannot_be_updated_are_refused() {
        // Another option's value is spelled like the image.
        let odd = process("t serve raw:/b --stats raw:/b --xen 7/xvdb");
        assert!(
            odd.words_for(&chain(&["raw:/c", "raw:/b"])).unwrap_err().advice.as_deref().unwrap().contains("SIGUSR2")
        );
    }

    #[test]
    fn a_process_without_xen_guest_is_refused() {
        for line in ["sleep 1000", "t serve raw:/a --nbd s", "t image info raw:/a", ""] {
            assert!(parse_command_line(line.replace(' ', "\0").as_bytes()).is_none(), "{line}");
        }
    }

    #[test]
    fn pasted_commands_are_quoted_per_argument() {
        let words = vec![OsString::from("serve"), "raw:/my disk's".into()];
        let launch = Launch { program: "/t".into(), words, directory: None, log: "/l".into() };
        assert_eq!(manual_command(&launch), r"(cd . && setsid /t serve 'raw:/my disk'\''s' </dev/null 2>>/l &)");
    }
}
