//! `xen attach`, `detach`, `upgrade`, `list`: attaches disks to Xen guests, as a toolstack does.
//!
//! The nodes in xenstore and the order of writes are in [`vm::xen`], over any [`Store`]. [`launch`] starts the disk
//! processes. This file combines them into commands and prints the results. It opens no image: the disk's process does.

mod arguments;
mod launch;
mod list;
mod upgrade;

use std::ffi::OsString;
use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::time::Duration;

use ::arguments::{Access, CacheMode, GrantPolicy, KIND};
use clap::ValueEnum;
use control::{Error, ImageName, Kind};
use vm::xen::adopt::{self, Adopted};
use vm::xen::both_ends::wait_connected;
use vm::xen::claim::{self, Places};
use vm::xen::device::{self, Device, store_failed, text};
use vm::xen::give::{self, Wish};
use vm::xen::vdev::Vdev;
use vm::xen::{domain, firmware, local, stale_files, take as taking};
use xen::xenstored::XenstoredClient;
use xen::{Store, StoreError};

pub use arguments::Xen;
use arguments::{Attach, Detach, Mode, ScriptAction, XenVerb};

use crate::hand_over::disk_program;
use crate::output::{self, print_local as print};
use launch::{Launch, Launched};

/// How long an xl block script may wait for the disk's process; libxl's own timeout is 40 s.
const SCRIPTS_PATIENCE: Duration = Duration::from_secs(30);

/// How long the driver in our own domain may take to connect to a disk that is already served.
const LOCAL_PATIENCE: Duration = Duration::from_secs(8);

/// How long a guest has to release a disk that is detached by force. A running guest needs milliseconds. If it has not
/// closed its end by then, its driver waits forever for its incomplete requests.
const BEFORE_FORCE: Duration = Duration::from_secs(2);

/// Runs the command.
pub fn run(xen: &Xen, json: bool) -> Result<(), Error> {
    let places = Places::of_host();
    let mut store = match (XenstoredClient::connect(), &xen.verb) {
        (Err(error), XenVerb::Detach(words)) if words.force && is_gone(&error) => {
            return detach_without_store(&places, words, store_failed(error));
        }
        (connected, _) => connected.map_err(store_failed)?,
    };
    match &xen.verb {
        XenVerb::Attach(words) => attach(&mut store, &places, words),
        XenVerb::Detach(words) => detach(&mut store, &places, words),
        XenVerb::Upgrade(words) => upgrade::upgrade(&mut store, &places, words),
        XenVerb::List { domain } => show(&mut store, domain.as_deref(), json),
        XenVerb::Script { action } => script(&mut store, &places, *action),
    }
}

/// Prints progress on stderr.
fn say(line: impl Display) {
    output::say(&format!("{line}\n"));
}

/// The program of disk processes.
fn program() -> Result<PathBuf, Error> {
    disk_program().map_err(|error| Error::cannot("find the program to start", error))
}

/// Runs `xen attach`.
fn attach(store: &mut dyn Store, places: &Places, words: &Attach) -> Result<(), Error> {
    let own = domain::own(store)?;
    let guest = domain::find(store, &words.domain)?;
    let vdev = match words.vdev {
        Some(vdev) => vdev,
        None => first_free(store, guest)?,
    };
    let device = Device { own, kind: words.backend_kind.clone(), guest, vdev };
    let wish = Wish { read_only: words.mode == Mode::R, kept: false };
    give::announce(store, &device, wish)?;
    if words.no_serve {
        say(format_args!("{device}: its nodes are created; it is not served yet"));
        say(format_args!("its backend is {}", device.backend()));
    } else {
        let process = ServeParameters {
            program: program()?,
            images: &words.images,
            read_only: wish.read_only,
            access: words.access,
            grants: words.grants,
            accept_changed_parent: words.accept_changed_parent,
            control: words.control.clone(),
            log: words.log.clone(),
            emulated: None,
        };
        serve(store, places, &device, &process, words.timeout)?;
    }
    if words.wait {
        wait_connected(store, &device, words.timeout, |states| say(format_args!("{device}: {states}")))?;
    }
    print(&format!("{vdev}\n"))
}

/// The parameters of a disk process.
struct ServeParameters<'a> {
    program: PathBuf,
    images: &'a [ImageName],
    read_only: bool,
    access: Access,
    grants: GrantPolicy,
    accept_changed_parent: bool,
    control: Option<PathBuf>,
    log: Option<PathBuf>,
    /// The NBD socket for the program that presents the disk to the guest's firmware.
    emulated: Option<PathBuf>,
}

/// Starts the disk's process; if that fails, the device is removed.
fn serve(
    store: &mut dyn Store,
    places: &Places,
    device: &Device,
    process: &ServeParameters<'_>,
    patience: Duration,
) -> Result<(), Error> {
    let control = process.control.clone().unwrap_or_else(|| places.control(device));
    let log = process.log.clone().unwrap_or_else(|| places.log(device));
    let launched = program_words(device, process, &control).and_then(|words| {
        let mut launched =
            Launch { program: process.program.clone(), words, directory: None, log: log.clone() }.start()?;
        launched.wait_serving(store, device, patience).map(|()| launched)
    });
    match launched {
        Ok(launched) => {
            report_served(device, &launched, &control, &log);
            Ok(())
        }
        Err(failure) => {
            // The first failure is reported. A remaining node is shown by `list` and removed by `detach`.
            give::withdraw(store, device).unwrap_or_else(|error| say(error.with_advice()));
            stale_files::remove(places, device, Some(&control), |line| say(line));
            Err(failure)
        }
    }
}

fn report_served(device: &Device, launched: &Launched, control: &Path, log: &Path) {
    say(format_args!("{device} is served by process {}", launched.pid()));
    say(format_args!("its log is {}", log.display()));
    say(format_args!("control it with: tapline disk {} VERB", control.display()));
}

/// The arguments of `tapline-disk serve`, with absolute paths: the process has its own working directory.
fn program_words(device: &Device, process: &ServeParameters<'_>, control: &Path) -> Result<Vec<OsString>, Error> {
    let whole = |path: &Path| {
        std::path::absolute(path)
            .map_err(|error| Error::cannot(format!("resolve the path of {}", path.display()), error))
    };
    let mut words: Vec<OsString> = vec!["serve".into()];
    for (layer, image) in process.images.iter().enumerate() {
        if layer > 0 {
            words.push("--parent".into());
        }
        words.push(image.map_paths(whole)?.word());
    }
    words.extend(["--xen".into(), format!("{}/{}", device.guest, device.vdev).into()]);
    words.extend(["--xen-backend".into(), device.kind.clone().into()]);
    words.extend(["--control".into(), whole(control)?.into()]);
    if let Some(socket) = &process.emulated {
        words.extend(["--nbd".into(), whole(socket)?.into()]);
    }
    words.extend(["--grants".into(), word(&process.grants)]);
    words.extend(["--cache".into(), word(&process.access.cache)]);
    if let Some(engine) = process.access.io_engine {
        words.extend(["--io-engine".into(), word(&engine)]);
    }
    if process.read_only {
        words.push("--read-only".into());
    }
    if process.accept_changed_parent {
        words.push("--accept-changed-parent".into());
    }
    Ok(words)
}

/// The name of a value on the command line.
fn word(value: &impl ValueEnum) -> OsString {
    value.to_possible_value().map(|word| word.get_name().into()).unwrap_or_default()
}

/// The first of xvda, xvdb, … that is free in the guest.
fn first_free(store: &mut dyn Store, guest: xen::DomId) -> Result<Vdev, Error> {
    for letter in 'a'..='z' {
        if let Ok(vdev) = format!("xvd{letter}").parse() {
            if text(store, None, &device::frontend(guest, vdev))?.is_none() {
                return Ok(vdev);
            }
        }
    }
    Err(Error::cannot(format!("find a free disk in domain {guest}"), "xvda to xvdz are all in use")
        .advise("give one with --vdev"))
}

/// Runs `xen detach`.
fn detach(store: &mut dyn Store, places: &Places, words: &Detach) -> Result<(), Error> {
    let own = domain::own(store)?;
    // A domain that no longer exists may have left a disk, so its number need not be in the store.
    let guest = match words.domain.parse() {
        Ok(number) => xen::DomId(number),
        Err(_) => domain::find(store, &words.domain)?,
    };
    let device = match taking::look_up(store, own, guest, words.vdev)? {
        Some(device) => device,
        None if words.force && stop_unlisted(places, own, guest, words.vdev)? => return Ok(()),
        None => return Err(taking::unknown(store, guest, words.vdev)),
    };
    taking::refuse_xls(store, &device)?;
    if !words.force {
        taking::refuse_kept(store, &device, "detach")?;
    }
    taking::ask(store, &device)?;
    let patience = if words.force { words.timeout.min(BEFORE_FORCE) } else { words.timeout };
    let closed = taking::wait_closed(store, &device, patience, |states| say(format_args!("{device}: {states}")));
    // With force the disk is detached in any case; an error of xenstore shows up again in `finish`.
    if !words.force {
        closed?;
    }
    finish(store, places, &device)?;
    say(format_args!("{device} is detached"));
    Ok(())
}

/// Whether xenstore does not run. If it only hangs, it may still have the disk when it responds again.
fn is_gone(error: &StoreError) -> bool {
    use std::io::ErrorKind::{ConnectionRefused, NotFound};
    matches!(error, StoreError::Unreachable { source, .. } if matches!(source.kind(), NotFound | ConnectionRefused))
}

/// `detach --force` without xenstore: the disk's process can still be stopped.
fn detach_without_store(places: &Places, words: &Detach, failure: Error) -> Result<(), Error> {
    // Only domain 0 serves disks, and the names of domains are in the store.
    let Ok(guest) = words.domain.parse() else { return Err(failure) };
    match stop_unlisted(places, xen::DomId(0), xen::DomId(guest), words.vdev)? {
        true => Ok(()),
        false => Err(failure),
    }
}

/// Stops the process of a disk that is missing in xenstore, because a restarted xenstored has lost all nodes. Returns
/// true if there was one.
fn stop_unlisted(places: &Places, own: xen::DomId, guest: xen::DomId, vdev: Vdev) -> Result<bool, Error> {
    let served = claim::served(places, own, guest, vdev)?;
    for device in &served {
        say(format_args!("{device} is not in xenstore; stopping its process"));
        claim::end_holder(places, device, |line| say(line))?;
        stale_files::remove(places, device, None, |line| say(line));
    }
    Ok(!served.is_empty())
}

/// Removes the nodes of a disk and stops its process. The guest's domain can only be destroyed when the process no
/// longer maps its pages. Files left by a killed process are removed, too.
fn finish(store: &mut dyn Store, places: &Places, device: &Device) -> Result<(), Error> {
    let control = stale_files::control_of(store, device)?;
    taking::remove(store, device)?;
    firmware::hide(store, device)?;
    claim::end_holder(places, device, |line| say(line))?;
    stale_files::remove(places, device, control.as_deref(), |line| say(line));
    Ok(())
}

/// Runs `xen list`.
fn show(store: &mut dyn Store, domain: Option<&str>, json: bool) -> Result<(), Error> {
    let own = domain::own(store)?;
    let only = domain.map(|word| domain::find(store, word)).transpose()?;
    let all = list::all(store, own, only)?;
    if !json {
        return print(&list::table(&all));
    }
    let text = serde_json::to_string_pretty(&all).map_err(|error| Error::cannot("print JSON", error))?;
    print(&format!("{text}\n"))
}

/// Does the work of xl's block script.
fn script(store: &mut dyn Store, places: &Places, action: ScriptAction) -> Result<(), Error> {
    let node = std::env::var("XENBUS_PATH").map_err(|error| {
        Error::cannot("get the disk from XENBUS_PATH", error)
            .advise("xl sets it when it calls /etc/xen/scripts/block-tapline")
            .of_kind(Kind::Invalid)
    })?;
    // libxl's path is relative to its own domain.
    let node = if node.starts_with('/') { node } else { format!("/local/domain/{}/{node}", domain::own(store)?) };
    match (action, Device::of_backend(&node)) {
        (ScriptAction::Remove, None) => Ok(()),
        (ScriptAction::Remove, Some(device)) => finish(store, places, &Device { kind: KIND.to_owned(), ..device }),
        (ScriptAction::Add, _) => {
            let adopted = adopt_from_xl(store, &node);
            let served = match &adopted {
                Ok(adopted) => serve_adopted(store, places, adopted),
                Err(error) => Err(error.clone()),
            };
            if let Err(failure) = &served {
                adopt::refuse(store, &node, adopted.as_ref().ok(), failure)?;
            }
            served
        }
    }
}

/// Adopts a disk from xl's backend, which may be for the domain in which xl runs.
fn adopt_from_xl(store: &mut dyn Store, node: &str) -> Result<Adopted, Error> {
    match Device::of_backend(node).is_some_and(|device| device.guest == device.own) {
        true => local::adopt(store, Path::new(local::BUSES), node, KIND),
        false => adopt::adopt(store, node, KIND),
    }
}

/// Serves an adopted disk with the defaults of `serve`.
fn serve_adopted(store: &mut dyn Store, places: &Places, adopted: &Adopted) -> Result<(), Error> {
    let process = ServeParameters {
        program: program()?,
        images: &adopted.images,
        read_only: adopted.wish.read_only,
        access: Access { cache: CacheMode::None, io_engine: None },
        grants: GrantPolicy::Auto,
        accept_changed_parent: false,
        control: None,
        log: None,
        emulated: firmware::reads(store, adopted.device.guest, adopted.wish)?.then(|| places.nbd(&adopted.device)),
    };
    serve(store, places, &adopted.device, &process, SCRIPTS_PATIENCE)?;
    if let Some(socket) = &process.emulated {
        let shown = firmware::show(store, Path::new(local::BUSES), &adopted.device, socket);
        shown
            .inspect_err(|_| finish(store, places, &adopted.device).unwrap_or_else(|error| say(error.with_advice())))?;
    }
    if local::shown_to_xl(&adopted.device).is_none() {
        return Ok(());
    }
    // For a disk of its own domain, xl opens the device next.
    let connected = wait_connected(store, &adopted.device, LOCAL_PATIENCE, |_| ());
    let shown = connected.and_then(|()| local::show(store, &adopted.device));
    shown.inspect_err(|_| finish(store, places, &adopted.device).unwrap_or_else(|error| say(error.with_advice())))
}

#[cfg(test)]
mod test {
    use ::arguments::IoEngine;

    use super::*;
    use vm::xen::fake::{WRITABLE, machine, stand_in};

    fn process(images: &[ImageName]) -> ServeParameters<'_> {
        ServeParameters {
            program: "false".into(),
            images,
            read_only: true,
            access: Access { cache: CacheMode::Writeback, io_engine: Some(IoEngine::Aio) },
            grants: GrantPolicy::Copy,
            accept_changed_parent: false,
            control: None,
            log: None,
            emulated: Some("/run/x-nbd.sock".into()),
        }
    }

    #[test]
    fn the_disk_process_parses_its_generated_arguments() {
        use clap::Parser;

        let (_host, _store, device) = machine();
        let images = ["qcow2:/a b.qcow2".parse().unwrap(), "raw:base.raw".parse().unwrap()];
        let words = program_words(&device, &process(&images), Path::new("/run/x.sock")).unwrap();
        let parsed =
            ::arguments::Arguments::try_parse_from([OsString::from("tapline-disk")].into_iter().chain(words)).unwrap();
        let ::arguments::Command::Serve(serve) = parsed.command else { panic!("not a serve command") };
        assert_eq!(serve.image, images[0]);
        assert!(serve.parents.names[0].path().is_absolute());
        assert_eq!(serve.xen.unwrap().to_string(), "7/xvdb");
        assert_eq!(serve.nbd.as_deref(), Some("/run/x-nbd.sock"));
        assert_eq!((serve.read_only, serve.grants, serve.xen_backend.as_str()), (true, GrantPolicy::Copy, "tapline"));
    }

    #[test]
    fn a_disk_that_cannot_be_served_leaves_no_device() {
        let directory = tempfile::tempdir().unwrap();
        let places = Places { log: directory.path().join("no/\0/such"), ..Places::below(directory.path()) };
        let (_host, mut store, device) = machine();
        give::announce(&mut store, &device, WRITABLE).unwrap();
        let images = ["raw:/none".parse().unwrap()];
        let failure = serve(&mut store, &places, &device, &process(&images), Duration::ZERO).unwrap_err();
        assert!(failure.message.contains("xen-7-xvdb.log"), "{failure}");
        assert_eq!(device.states(&mut store, None).unwrap(), (None, None));
    }

    #[test]
    fn the_first_free_disk_is_chosen() {
        let (_host, mut store, device) = machine();
        assert_eq!(first_free(&mut store, device.guest).unwrap().to_string(), "xvda");
        give::announce(&mut store, &Device { vdev: "xvda".parse().unwrap(), ..device.clone() }, WRITABLE).unwrap();
        assert_eq!(first_free(&mut store, device.guest).unwrap().to_string(), "xvdb");
    }

    #[test]
    fn a_detached_disk_is_gone_whether_served_or_not() {
        let directory = tempfile::tempdir().unwrap();
        let places = Places::below(directory.path());
        let (_host, mut store, device) = machine();
        give::announce(&mut store, &device, WRITABLE).unwrap();
        let words = |force| Detach { domain: "vm".into(), vdev: device.vdev, force, timeout: Duration::ZERO };
        let failure = detach(&mut store, &places, &words(false)).unwrap_err();
        assert!(failure.advice.as_deref().unwrap().contains("--force"), "{failure}");
        detach(&mut store, &places, &words(true)).unwrap();
        assert_eq!(device.states(&mut store, None).unwrap(), (None, None));
        assert!(detach(&mut store, &places, &words(true)).unwrap_err().message.contains("it has no such disk"));
    }

    #[test]
    fn a_disk_missing_from_xenstore_is_only_stopped_by_force() {
        let directory = tempfile::tempdir().unwrap();
        let places = Places::below(directory.path());
        let (_host, mut store, device) = machine();
        let mut process = stand_in(&places, &device).unwrap();
        let words = |force| Detach { domain: "7".into(), vdev: device.vdev, force, timeout: Duration::from_secs(60) };
        assert!(detach(&mut store, &places, &words(false)).unwrap_err().message.contains("it has no such disk"));
        assert_eq!(process.try_wait().unwrap(), None);
        detach(&mut store, &places, &words(true)).unwrap();
        assert!(!process.wait().unwrap().success());
        assert_eq!(std::fs::read_dir(&places.run).unwrap().count(), 0);

        let mut process = stand_in(&places, &device).unwrap();
        detach_without_store(&places, &words(true), Error::new(Kind::Failed, "no store")).unwrap();
        assert!(!process.wait().unwrap().success());
        let failure = detach_without_store(&places, &words(true), Error::new(Kind::Failed, "no store")).unwrap_err();
        assert_eq!(failure.message, "no store");
    }

    #[test]
    fn detaching_a_killed_disk_removes_the_socket_recorded_in_xenstore() {
        let directory = tempfile::tempdir().unwrap();
        let places = Places::below(directory.path());
        let (_host, mut store, device) = machine();
        give::announce(&mut store, &device, WRITABLE).unwrap();
        let socket = directory.path().join("named.sock");
        drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
        let named = format!("{}/tapline/control", device.backend());
        store.write(None, &named, socket.to_str().unwrap().as_bytes()).unwrap();
        let words = Detach { domain: "7".into(), vdev: device.vdev, force: true, timeout: Duration::ZERO };
        detach(&mut store, &places, &words).unwrap();
        assert!(!socket.exists());
    }
}
