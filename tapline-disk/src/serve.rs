//! `serve`: one image, one transport and one thread, perhaps with lanes; for a Xen guest also an NBD server, if the
//! guest's firmware is to read the disk.
//!
//! Everything arrives through the engine's single wait: kicks, connections, completed operations, signals. When nothing
//! happens the thread sleeps in it without a timeout ([`event_loop`]). This file opens what the command line specifies
//! and announces where the disk is served.

mod address;
pub mod admission;
mod bitmaps;
mod blkback_stats;
mod changes;
mod control;
mod engine_watch;
mod event_loop;
mod guest;
mod handover;
mod own_keys;
mod page;

pub mod polling;
mod quiet;
pub mod serial;
mod shaping;
pub mod stats;
mod takeover;
pub mod threads;

use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use ::control::handed::Listens;
use ::control::size::readable;
use ::control::{ImageName, Kind};
use disk::{Disk, Image};
use transport::{Handover, HandoverError, Server, nbd, vhost_user};
use uring::{Engine, EngineKind, ImageFile};
use vm::paste::{self, Served};

use crate::files::Files;
use crate::files::access;
use crate::image::chain::{self, Chain, Layers};
use crate::image::engine_choice::{self, Data};
use crate::image::fileless;
use crate::image::http;
use crate::process::failure::{Exit, Failure, explain, only_read};
use crate::process::log::say;
use crate::process::output;
use crate::process::signals::Signal;
use crate::serve::polling::{Contention, Polling, Settings};
use crate::serve::stats::Counters;
use crate::serve::threads::{Processors, Threads};
use arguments::{GrantPolicy, LogicalBlock, PrintFor, Serve, WhenFull};

use admission::Admission;
use admission::limits::Limiter;
use admission::share;
use bitmaps::Wanted;
use changes::Prepared;
use event_loop::{EventLoop, Serving};
use shaping::Shaping;
use takeover::{Listening, PendingRelease, Takeover};

/// File operations that the engine takes at once: a few requests of every queue that a guest is likely to have. More
/// wait in the disk's backlog; the number of requests is limited by transports only.
const ENGINE_DEPTH: usize = 256;

/// Runs the command until a signal ends it. With `tls`, NBD clients must use it.
pub fn run(from: &Files, serve: &Serve, tls: Option<nbd::Tls>) -> Result<Exit, Failure> {
    check_remote(serve)?;
    if serve.image.format.is_read_only() {
        return Err(only_read(format!("serve {}", serve.image), &serve.image));
    }
    let [stop, leave, report] = signals()?;
    if let Some(path) = &serve.stats {
        stats::open_file(path)
            .map_err(|error| Failure::new(format!("append statistics to {}", path.display()), error))?;
    }
    let guest = serve.xen.as_ref().map(|disk| guest::Claimed::find(from, serve, disk)).transpose()?;
    let read_only = serve.read_only || guest.as_ref().is_some_and(|guest| guest.read_only);
    let mut taken = serve.take_over.then(|| Takeover::receive(from)).transpose()?;
    let wanted = Wanted::check(from, serve, read_only, taken.as_mut().map(Takeover::take_bitmaps))?;
    let handed = if taken.is_none() { Some(Sockets::find(from, serve)?) } else { None };
    let (layers, map) = changes::open(from, serve, taken.as_ref(), !read_only)?;
    let bitmaps = wanted.open(from, &layers, map.as_ref().map(Prepared::id))?;
    serial::choose(serve, &layers);
    let block = serve.logical_block_size.map_or_else(|| layers.block(), LogicalBlock::bytes);
    let Layers { name, files, images, logs, unsettled, .. } = layers;
    let page = page::find(from, serve);
    let admission = admission(from, serve, taken.as_ref());
    let shaping = shaping(serve, taken.as_ref(), &name, &files)?;
    let (sockets, counters) = match (handed, taken) {
        (Some(sockets), _) => (sockets, Counters::default()),
        (None, Some(taken)) => Sockets::taken_over(taken),
        (None, None) => return Err(Failure::new("serve", "there are no sockets to listen at")),
    };
    from.forget();
    let mut disk = chain::disk_of(images, logs, &unsettled, block).map_err(|error| {
        let failure = explain(&name, error);
        if block > 512 { failure.advise("serve it with --logical-block-size 512") } else { failure }
    })?;
    let mut engine = engine(serve, &name, files, &shaping)?;
    let changes = changes::begin(map, bitmaps, &mut disk, &mut engine)?;
    say(describe(&name, &disk, engine.kind()));
    shaping.line().iter().for_each(say);
    let polling = polling(serve, &counters);
    let threads = threads(serve, &counters);
    let control = control(serve, sockets.control)?;
    let serving = Serving {
        files: from.clone(),
        disk,
        engine,
        polling,
        threads,
        stats_file: serve.stats.clone(),
        blkback_stats: None,
        stop,
        leave,
        report,
        control,
        admission,
        shaping,
        changes,
        counters,
        page,
        identity: identity(serve, &name),
    };
    match (&serve.vhost_user, &serve.nbd, guest) {
        (Some(socket), _, _) => serve_vhost_user(serve, socket, sockets.transport, serving),
        (None, _, Some(guest)) => serve_guest(serve, guest, sockets.transport, serving),
        (None, Some(address), None) => serve_nbd(serve, address, sockets.transport, tls, serving),
        (None, None, None) => {
            Err(Failure::new(format!("serve {name}"), "no transport is given").of_kind(Kind::Invalid))
        }
    }
}

/// Takes the signals to stop, to leave the client to another process, and to report statistics.
fn signals() -> Result<[Signal; 3], Failure> {
    let failed = |name: &'static str| move |error| Failure::new(format!("handle {name}"), error);
    Ok([
        Signal::to_stop().map_err(failed("SIGTERM"))?,
        Signal::to_leave().map_err(failed("SIGUSR2"))?,
        Signal::to_report().map_err(failed("SIGUSR1"))?,
    ])
}

/// Rejects what a disk with an image at an NBD server does not have: successors need files that can be passed on.
fn check_remote(serve: &Serve) -> Result<(), Failure> {
    let names = || std::iter::once(&serve.image).chain(&serve.parents.names);
    names().try_for_each(|name| http::refuse(format!("serve {name}"), name))?;
    let Some(remote) = names().find(|name| name.uri().is_some()) else { return Ok(()) };
    let option = match () {
        () if serve.xen.is_some() => "--xen",
        () if serve.take_over => "--take-over",
        () => return Ok(()),
    };
    let why = format!("a disk with {remote}, which is at an NBD server, cannot be served with {option}");
    Err(Failure::new(format!("serve {}", serve.image), why).advise(format!("omit {option}")).of_kind(Kind::Invalid))
}

/// Opens the engine, with the number of lanes that a test requests.
fn engine(serve: &Serve, name: &ImageName, files: Vec<ImageFile>, shaping: &Shaping) -> Result<Engine, Failure> {
    let mut engine = engine_choice::open(name, access::engine(serve.access), files, ENGINE_DEPTH, data(serve))?;
    let stores_nothing = engine.kind().stores_nothing();
    if stores_nothing {
        say(format_args!("{name} is for measurements: {}", fileless::WARNING));
    }
    let lanes = if stores_nothing { 0 } else { threads::forced().unwrap_or(1).saturating_sub(1) };
    for _ in 0..lanes {
        engine.start_lane().map_err(Failure::said)?;
    }
    engine.prefer_lanes();
    engine.set_shape(shaping.in_force());
    Ok(engine)
}

/// Opens the control socket, if there is to be one.
fn control(serve: &Serve, listening: Option<Listening>) -> Result<Option<control::Control>, Failure> {
    let control = match (&serve.control, listening) {
        (None, _) => None,
        (Some(path), None) => Some(control::Control::bind(path)?),
        (Some(path), Some(Listening { socket, bound })) => Some(control::Control::at(socket, path, bound)?),
    };
    Ok(control.map(|control| control.of_daemon(serve.managed)))
}

/// Returns how to wait: like the process that is taken over, or as the command line says.
fn polling(serve: &Serve, counters: &Counters) -> Polling {
    let requested = Settings::new(serve.polling.into(), Duration::from_micros(serve.poll_max));
    Polling::new(counters.polling.unwrap_or(requested), Contention::of_this_thread())
}

/// Returns how transfers are split and merged: like the process that is taken over, or as the command line says.
fn shaping(serve: &Serve, taken: Option<&Takeover>, name: &ImageName, files: &[ImageFile]) -> Result<Shaping, Failure> {
    match taken {
        Some(taken) => Ok(taken.shaping.clone()),
        None => Shaping::of(serve, name, files.first()),
    }
}

/// Returns how many threads to use: as set while the disk was served, or as the command line says.
fn threads(serve: &Serve, counters: &Counters) -> Threads {
    let mut threads = Threads::new(serve.threads, Processors::of_this_process());
    counters.threads.into_iter().for_each(|most| threads.set_most(most));
    threads
}

/// Returns admission with the limits and the share of the process that is taken over, or those of the command line.
fn admission(files: &Files, serve: &Serve, taken: Option<&Takeover>) -> Admission {
    let (handed, now) = (taken.map(|taken| taken.limits), ::stats::monotonic());
    let mut limiter = match handed {
        Some(handed) => Limiter::taken_over(handed, now),
        None => Limiter::new(serve.limit.as_deref().copied().unwrap_or_default(), now),
    };
    limiter.set_sharing(share::find(files, serve, handed.and_then(|handed| handed.share)));
    Admission::new(limiter, serve.when_full == WhenFull::Wait)
}

/// Describes the disk, for readers of its statistics page.
fn identity(serve: &Serve, name: &ImageName) -> String {
    let whole = |path: &Path| std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let text = |path: &Path| whole(path).to_string_lossy().into_owned();
    let name = name.map_paths(|path| Ok::<_, std::convert::Infallible>(whole(path)));
    let name = name.map_or_else(|never| match never {}, |name| name.to_string());
    let (transport, at) = match (&serve.vhost_user, &serve.nbd, &serve.xen) {
        (Some(socket), ..) => ("vhost-user", text(socket)),
        (None, _, Some(disk)) => ("blkif", disk.to_string()),
        (None, Some(address), None) => ("nbd", address.clone()),
        (None, None, None) => ("none", String::new()),
    };
    serde_json::json!({
        "image": name,
        "transport": transport,
        "at": at,
        "control": serve.control.as_deref().map(text),
        // Only virtio has serial numbers.
        "serial": serial::in_force(),
        "program": env!("CARGO_PKG_VERSION"),
    })
    .to_string()
}

/// Opens the layers: those on the command line, or those of the process that is taken over.
fn open(files: &Files, serve: &Serve, taken: Option<&Takeover>, write: bool) -> Result<Layers, Failure> {
    let accept_failed_sync = serve.accept_failed_sync && taken.is_none();
    let served = Some(chain::Served { accept_failed_sync, taken_over: taken.is_some(), below_failed: false });
    let chain = match taken {
        None => Chain { served, ..Chain::of(files, &serve.image, &serve.parents) },
        // The process that is taken over has verified the layers.
        Some(taken) => Chain {
            names: taken.layers.iter().collect(),
            accept_changed: true,
            served,
            ..Chain::of(files, &serve.image, &serve.parents)
        },
    };
    Layers::open_chain(&chain, access::options(serve.access, write))
}

/// The origin of the server's socket.
enum Transport {
    /// To be bound where the command line says: for NBD at this address, which has been checked.
    ToBind(Option<nbd::Address>),
    /// Passed to this process, and already listening.
    Handed(OwnedFd),
    /// Taken over from the previous process, together with its peers.
    TakenOver(Handover, PendingRelease),
}

/// The sockets of the server and of the control socket.
struct Sockets {
    transport: Transport,
    control: Option<Listening>,
}

impl Sockets {
    fn taken_over(taken: Takeover) -> (Sockets, Counters) {
        let (counters, control, server, rest) = taken.parts();
        (Sockets { transport: Transport::TakenOver(server, rest), control }, counters)
    }

    /// Finds the sockets that were passed, and checks the addresses of those to bind: with an invalid address no image
    /// is opened.
    fn find(files: &Files, serve: &Serve) -> Result<Sockets, Failure> {
        let handed = |listens, path: Option<&Path>| path.map_or(Ok(None), |path| files.listener(listens, path));
        let transport = match (&serve.vhost_user, &serve.nbd) {
            (Some(path), _) => handed(Listens::VhostUser, Some(path))?.map(Transport::Handed),
            (None, Some(address)) => Some(match handed(Listens::Nbd, Some(Path::new(address)))? {
                Some(socket) => Transport::Handed(socket),
                None => Transport::ToBind(Some(address::checked_address(serve, address)?)),
            }),
            (None, None) => None,
        };
        let transport = transport.unwrap_or(Transport::ToBind(None));
        let control = handed(Listens::Control, serve.control.as_deref())?;
        let control = control.map(|socket| Listening { socket, bound: None });
        files.reject_unused_listeners()?;
        Ok(Sockets { transport, control })
    }
}

/// Returns whose memory the engine transfers data to and from.
fn data(serve: &Serve) -> Data {
    match serve.grants {
        GrantPolicy::Map if serve.xen.is_some() => Data::Granted,
        _ => Data::Own,
    }
}

fn describe(name: &ImageName, disk: &Disk<Image>, kind: EngineKind) -> String {
    let geometry = disk.geometry();
    let access = if geometry.read_only { "read-only" } else { "writable" };
    let parents = match disk.layers().len() {
        0 | 1 => String::new(),
        2 => ", on 1 parent".into(),
        layers => format!(", on {} parents", layers - 1),
    };
    format!("{name}: {}{parents}, {access}, {}", readable(geometry.len), engine_choice::words(kind))
}

fn serve_vhost_user(serve: &Serve, socket: &Path, transport: Transport, serving: Serving) -> Result<Exit, Failure> {
    let config = vhost_user::Config {
        path: socket.to_owned(),
        queues: serve.queues,
        serial: serial::in_force().unwrap_or_default().to_owned(),
        geometry: serving.disk.geometry(),
    };
    let block = config.geometry.block;
    let server = match transport {
        Transport::ToBind(_) => vhost_user::Server::bind(config),
        Transport::Handed(handed) => {
            vhost_user::Listener::of_socket(handed, socket).and_then(|socket| vhost_user::Server::on(socket, config))
        }
        Transport::TakenOver(server, rest) => {
            return resume(vhost_user::Server::taken_over(server, config), rest, serving);
        }
    };
    let server = server.map_err(cannot_listen)?;
    announce(serve, Served::VhostUser(&absolute(socket)?, serve.queues), block)?;
    EventLoop::new(server, serving)?.run()
}

fn serve_nbd(
    serve: &Serve,
    address: &str,
    transport: Transport,
    tls: Option<nbd::Tls>,
    serving: Serving,
) -> Result<Exit, Failure> {
    if serve.queues > 1 {
        say("--queues has no effect with --nbd: clients can open any number of connections");
    }
    let export = nbd::Export { bitmaps: serving.changes.bitmaps.names(), ..export(serve, &serving.disk) };
    let server = match transport {
        Transport::TakenOver(server, rest) => {
            return resume(nbd::Server::taken_over(server, Path::new(address), export, tls), rest, serving);
        }
        here => nbd_server(serve, address, here, export, tls)?,
    };
    EventLoop::new(server, serving)?.run()
}

/// Starts a server that listens, and announces it.
fn nbd_server(
    serve: &Serve,
    address: &str,
    transport: Transport,
    export: nbd::Export,
    tls: Option<nbd::Tls>,
) -> Result<nbd::Server, Failure> {
    let block = export.geometry.block;
    let server = match transport {
        Transport::Handed(socket) => nbd::Server::on_socket(socket, Path::new(address), export, tls),
        Transport::ToBind(Some(address)) => {
            let config = nbd::Config { address, export, tls };
            // The disk that a guest's firmware reads is only for QEMU.
            if serve.xen.is_some() { nbd::Server::bind_private(config) } else { nbd::Server::bind(config) }
        }
        Transport::ToBind(None) | Transport::TakenOver(..) => unreachable!("{address} was handed or is to be bound"),
    };
    let server = server.map_err(cannot_listen)?;
    match server.address() {
        nbd::Address::Unix(path) => announce(serve, Served::NbdUnix(&absolute(path)?), block)?,
        // The system may have chosen the port.
        nbd::Address::Tcp(address) => {
            announce(serve, Served::NbdTcp(&address.ip().to_string(), address.port()), block)?
        }
    }
    Ok(server)
}

/// Takes over from another process, which then has released everything.
fn resume<S: Server>(
    server: Result<S, HandoverError>,
    rest: PendingRelease,
    serving: Serving,
) -> Result<Exit, Failure> {
    let server = server.map_err(|error| Failure::new("take over the disk's connections", error))?;
    rest.begin()?;
    EventLoop::new(server, serving)?.run()
}

fn serve_guest(serve: &Serve, guest: guest::Claimed, transport: Transport, serving: Serving) -> Result<Exit, Failure> {
    if serve.print.is_some() && serve.nbd.is_none() {
        say("--print has no effect with --xen: `tapline xen attach` configures the guest");
    }
    // The NBD server listens before the guest's backend is served: the toolstack then continues, and may start QEMU,
    // which connects.
    let export = export(serve, &serving.disk);
    let emulated =
        serve.nbd.as_deref().map(|address| nbd_server(serve, address, transport, export, None)).transpose()?;
    guest::run(serve, guest, emulated, serving)
}

fn export(serve: &Serve, disk: &Disk<Image>) -> nbd::Export {
    // It is also the default export, for clients that request the empty name.
    let path = || Some(serve.image.path()).filter(|_| serve.image.uri().is_none());
    let file = || path()?.file_name().map(|name| name.to_string_lossy().into_owned());
    let name = serve.nbd_export.clone().or_else(file).unwrap_or_default();
    let layered = disk.layers().iter().any(|layer| !matches!(layer.format, Image::Raw(_)));
    let description = serve.image.to_string();
    nbd::Export { name, description, geometry: disk.geometry(), layered, bitmaps: Vec::new() }
}

/// Announces where the disk is served: prints the requested configuration on stdout, and a message for people on
/// stderr.
fn announce(serve: &Serve, served: Served<'_>, block: u32) -> Result<(), Failure> {
    if let Some(target) = serve.print {
        let disk = paste::Properties { read_only: serve.read_only, block };
        output::print(&paste::text(target.into(), served, disk).map_err(Failure::said)?)?;
    }
    let scheme = if serve.nbd_tls.is_some() { "nbds" } else { "nbd" };
    match served {
        Served::VhostUser(socket, queues) => {
            let queues = if queues == 1 { "1 queue".into() } else { format!("{queues} queues") };
            let serial = serial::in_force().unwrap_or_default();
            say(format_args!("serving vhost-user-blk at {}, {queues}, serial number {serial}", socket.display()));
        }
        Served::NbdUnix(socket) => {
            say(format_args!("serving NBD at {scheme}+unix:///?socket={}", in_uri(socket)));
        }
        Served::NbdTcp(host, port) if host.contains(':') => {
            say(format_args!("serving NBD at {scheme}://[{host}]:{port}"));
        }
        Served::NbdTcp(host, port) => say(format_args!("serving NBD at {scheme}://{host}:{port}")),
    }
    if serve.print.is_none() && serve.xen.is_none() && serve.nbd_tls.is_none() {
        let names = [PrintFor::Qemu, PrintFor::Libvirt].map(|target| format!("--print {target:?}").to_lowercase());
        say(format_args!("add {} to print the VMM's configuration; SIGTERM stops it cleanly", names.join(" or ")));
    }
    Ok(())
}

/// Escapes a path as a query value in a URI (RFC 3986, 3.4): characters that would end the value or the surrounding
/// word.
fn in_uri(path: &Path) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~/:@,".contains(&byte);
    let escaped = |&byte: &u8| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") };
    path.as_os_str().as_bytes().iter().map(escaped).collect()
}

/// Makes a path absolute, because the printed configuration is used in other directories.
fn absolute(path: &Path) -> Result<PathBuf, Failure> {
    std::path::absolute(path).map_err(|error| Failure::new(format!("resolve the path of {}", path.display()), error))
}

/// Reports that a server cannot listen; the error itself names the address.
fn cannot_listen(error: impl std::error::Error + 'static) -> Failure {
    Failure::said(error)
        .advise("stop the process that uses it, or choose another path: unused and at most 107 bytes long")
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_path_is_escaped_in_a_uri() {
        assert_eq!(in_uri(Path::new("/a/my disk&\u{e9}#1.sock")), "/a/my%20disk%26%C3%A9%231.sock");
    }
}
