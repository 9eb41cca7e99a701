//! The control socket: users who may run this process can request changes of the disk while its guest keeps running.
//!
//! [`Control`] is another listener in the disk's single wait. It reads requests ([`client`], crate `control`) and
//! drives the verb in progress from one event to the next; a verb never blocks the thread: work that may wait for
//! storage is a [`blocking_task`]. Without clients and verbs it costs nothing.
//!
//! Invariants: at most one long-running verb is in progress; every request is answered once, unless its client has
//! disconnected; a request is begun only while its client is connected, and then continues without it.

mod access;
mod blocking_task;
mod child;
mod client;
mod clone;
mod copy;
mod copying;
mod driver;
mod finish;
mod handed;
mod job;
mod merge;
mod merged;
mod merging;
mod pause;
mod pop;
mod rate_limiter;
mod reflink;
mod report;
mod resize;
mod revert;
mod snapshot;
mod standstill;
mod successor;
mod track;
mod upgrade;
mod watching;
mod work;

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use control::answer::{self, Answer, Paused};
use control::ask::{Immediate, LongRunning};
use control::{Id, Kind, Reply, Request, Verb};
use disk::Token;
use transport::vhost_user::Listener;
use transport::{Interest, Watch, WatchKey};

use client::{Client, Heard};
use job::{Job, Steps};
use merge::MergeJob;
use merging::Merging;
use watching::Watchers;

use crate::files::Handed;
use crate::process::failure::Failure;
use crate::process::log::say;
use crate::process::panics;
use crate::serve::own_keys::{self, BLOCKING_TASK, CONTROL_LISTENER, MERGE_TIMER, SUCCESSOR, UPGRADE_TIMER};

pub use pause::Pause;
pub use work::{Flush, Work};

/// The token of a flush by this process. The tokens of a server's connections and queues never reach it.
pub const FLUSH: Token = Token(u64::MAX - 1);

/// The maximum number of clients: a daemon, a person, a monitor, and their successors.
const CLIENTS_MAX: usize = 16;

/// Lines accepted from one client before the guest gets its turn.
const TURN: usize = 4;

/// The control socket of one disk.
pub struct Control {
    listener: Listener,
    clients: [Option<Client>; CLIENTS_MAX],
    /// The number of clients so far.
    count: u64,
    /// Whether clients may be waiting to be accepted.
    knocked: bool,
    job: Option<(Job, Asker)>,
    merging: Option<Merging>,
    /// The result of the last merge.
    merged: Option<answer::Merge>,
    watchers: Watchers,
    paused: bool,
    stopping: bool,
    /// Whether a daemon's catalogue must know of every change.
    managed: bool,
}

/// The client and the request that an answer belongs to.
#[derive(Clone, Debug)]
struct Asker {
    place: usize,
    number: u64,
    id: Id,
}

impl Control {
    /// Listens at `path`, for this user only.
    pub fn bind(path: &Path) -> Result<Control, Failure> {
        let listener = Listener::bind_private(path).map_err(|error| {
            Failure::said(error).advise("choose another path for --control: unused and at most 107 bytes long")
        })?;
        Ok(Control::on(listener))
    }

    /// Like [`Control::bind`], on a socket that is already listening, with the mode set by its creator. `bound`: device
    /// and inode of its path, if that must be removed at the end.
    pub fn at(socket: OwnedFd, path: &Path, bound: Option<(u64, u64)>) -> Result<Control, Failure> {
        Listener::of_bound(socket, path, bound).map(Control::on).map_err(Failure::said)
    }

    fn on(listener: Listener) -> Control {
        let clients = [const { None }; CLIENTS_MAX];
        Control {
            listener,
            clients,
            count: 0,
            knocked: true,
            job: None,
            merging: None,
            merged: None,
            watchers: Watchers::default(),
            paused: false,
            stopping: false,
            managed: false,
        }
    }

    /// Sets whether the disk is in the catalogue of a daemon.
    pub fn of_daemon(self, managed: bool) -> Control {
        Control { managed, ..self }
    }

    /// Watches the socket.
    pub fn start(&mut self, watch: &mut dyn Watch) -> io::Result<()> {
        self.listener.begin();
        watch.watch(self.listener.fd(), Interest::Read, CONTROL_LISTENER)
    }

    /// Handles an event with this key; returns whether it belongs to the control socket.
    pub fn ready(&mut self, key: WatchKey) -> bool {
        match key {
            CONTROL_LISTENER => self.knocked = true,
            // The verb that started the blocking task checks it.
            BLOCKING_TASK | MERGE_TIMER | SUCCESSOR | UPGRADE_TIMER => {}
            key => {
                let place = own_keys::client_of(key).and_then(|place| self.clients.get_mut(place));
                let Some(place) = place else { return false };
                if let Some(client) = place {
                    client.wake();
                }
            }
        }
        true
    }

    /// Returns whether there is something to do without being woken.
    pub fn is_awake(&self) -> bool {
        let hungry = self.merging.as_ref().is_some_and(|merging| merging.merge.is_hungry());
        hungry || self.knocked || self.clients.iter().flatten().any(Client::is_awake)
    }

    /// Returns whether a verb is in progress.
    pub fn is_working(&self) -> bool {
        self.job.is_some() || self.merging.is_some()
    }

    /// Returns whether there are no clients and nothing to do, which is nearly always the case.
    fn is_forgotten(&self) -> bool {
        !self.knocked && !self.paused && !self.is_working() && self.clients.iter().all(Option::is_none)
    }

    /// Returns whether a client holds requests.
    pub fn is_paused(&self) -> bool {
        self.paused
    }

    /// Does everything that can be done now.
    pub fn turn(&mut self, work: &mut Work<'_>) {
        if self.is_forgotten() {
            return;
        }
        self.admit(work);
        self.go_on(work);
        self.go_on_merging(work);
        for place in 0..CLIENTS_MAX {
            for _ in 0..TURN {
                if !self.listen(place, work) {
                    break;
                }
            }
        }
        // An upgrade to a process that already existed has just begun: no other event would stop a paused merge.
        if self.job.as_mut().and_then(|(job, _)| job.as_upgrade()).is_some_and(|upgrade| upgrade.needs_no_merge()) {
            self.go_on_merging(work);
        }
        self.tell_watchers(work.condition());
        self.reap_clients(work);
        panics::under_way(self.under_way());
    }

    /// Returns the verb in progress.
    fn under_way(&self) -> Option<&'static str> {
        self.job.as_ref().map(|(job, _)| job.verb()).or(self.merging.is_some().then_some("merge"))
    }

    /// Stops the control socket: no further verbs are begun; the one in progress is finished, and nothing stays paused.
    pub fn stop(&mut self, work: &mut Work<'_>) {
        self.stopping = true;
        work.engine.forget(CONTROL_LISTENER.0);
        self.listener.remove_path();
        self.paused = false;
        work.paused = false;
        if let Some(merging) = &mut self.merging {
            merging.merge.cancel();
        }
        self.end_upgrade(work);
        let switching = self.merging.as_ref().is_some_and(|merging| merging.merge.is_switching());
        if self.job.is_none() && !switching {
            work.let_go();
        }
    }

    /// Fails an upgrade in progress: no other process takes over a disk that stops.
    fn end_upgrade(&mut self, work: &mut Work<'_>) {
        if let Some((mut job, asker)) = self.job.take_if(|(job, _)| job.as_upgrade().is_some()) {
            job.undo(work);
            self.reply(Some(&asker), Err(Failure::of(Kind::State, "the disk is stopping")));
        }
    }

    fn admit(&mut self, work: &mut Work<'_>) {
        while std::mem::take(&mut self.knocked) && !self.stopping {
            match self.listener.accept() {
                Ok(None) => {}
                Ok(Some(socket)) => {
                    self.knocked = true;
                    self.count = self.count.wrapping_add(1);
                    let admitted = Client::new(socket, self.count).and_then(|client| self.seat(client, work));
                    if let Err(error) = admitted {
                        say(format_args!("cannot accept a client on the control socket: {error}"));
                    }
                }
                Err(error) => say(format_args!("cannot accept a client on the control socket: {error}")),
            }
        }
    }

    fn seat(&mut self, mut client: Client, work: &mut Work<'_>) -> io::Result<()> {
        let Some(place) = self.clients.iter().position(Option::is_none) else {
            let refusal = Failure::of(Kind::Busy, format!("there are already {CLIENTS_MAX} clients"));
            client.say(&line(&Id::default(), Err(refusal.advise("retry when one has disconnected"))));
            return Ok(());
        };
        // Also for writing: an answer may not fit at once.
        work.engine.watch(client.as_fd(), true, own_keys::of_client(place).0)?;
        if let Some(seat) = self.clients.get_mut(place) {
            *seat = Some(client);
        }
        Ok(())
    }

    fn reap_clients(&mut self, work: &mut Work<'_>) {
        for (place, seat) in self.clients.iter_mut().enumerate() {
            if seat.as_ref().is_some_and(Client::is_over) {
                work.engine.forget(own_keys::of_client(place).0);
                *seat = None;
            }
        }
    }

    /// Reads and executes one line of a client. Returns whether there may be more.
    fn listen(&mut self, place: usize, work: &mut Work<'_>) -> bool {
        let Some(Some(client)) = self.clients.get_mut(place) else { return false };
        if !client.is_awake() {
            return false;
        }
        let number = client.number;
        let heard = match client.hear() {
            Heard::Line(line) => line,
            Heard::Nothing => return false,
            Heard::TooLong => {
                let what = format!("a line is longer than {} bytes", client::LINE_MAX);
                client.say(&line(&Id::default(), Err(Failure::of(Kind::Malformed, what))));
                return false;
            }
        };
        let (id, asked) = Request::parse(&heard);
        let asked = asked.map_err(Failure::from);
        // Descriptors that came with an invalid line are closed.
        let wanted = |asked: &Request| asked.files.len() + handed::others(&asked.verb);
        let came = client.claim(asked.as_ref().map_or(0, wanted));
        let asker = Asker { place, number, id };
        let outcome = asked.and_then(|asked| self.obey(asked, came?, &asker, work));
        if let Some(outcome) = outcome.transpose() {
            self.tell(&asker, outcome);
        }
        true
    }

    /// Sends an answer at once, without a pending reply.
    fn tell(&mut self, asker: &Asker, outcome: Result<Answer, Failure>) {
        if let Some(client) = self.client(asker) {
            client.say(&line(&asker.id, outcome));
        }
    }

    /// Returns the client that made the request, if it is still connected.
    fn client(&mut self, asker: &Asker) -> Option<&mut Client> {
        self.clients.get_mut(asker.place)?.as_mut().filter(|client| client.number == asker.number)
    }

    /// Executes a verb; returns the answer, if it is available at once.
    fn obey(
        &mut self,
        Request { verb, files }: Request,
        mut came: Vec<OwnedFd>,
        asker: &Asker,
        work: &mut Work<'_>,
    ) -> Result<Option<Answer>, Failure> {
        let other = (handed::others(&verb) > 0).then(|| came.pop()).flatten();
        let files = handed::files(files, came)?;
        if self.managed {
            handed::check_managed(&verb, &files)?;
        }
        handed::check(work.files, &verb, &files)?;
        let word = verb.word();
        match verb {
            Verb::Immediate(verb) => self.obey_at_once(verb, &files, asker, work).map(Some),
            Verb::LongRunning(verb) => self.begin(word, verb, files, other, asker, work),
        }
    }

    /// Executes a verb that takes no steps, whatever else is in progress: reports, settings, and changes of a merge.
    fn obey_at_once(
        &mut self,
        verb: Immediate,
        files: &Handed,
        asker: &Asker,
        work: &mut Work<'_>,
    ) -> Result<Answer, Failure> {
        Ok(match verb {
            Immediate::Version(_) => report::version().into(),
            Immediate::Layers(_) => report::layers(work).into(),
            Immediate::Stats(_) => report::stats(work).into(),
            Immediate::Polling(asked) => report::polling(asked, work)?.into(),
            Immediate::Shape(asked) => report::shape(asked, work)?.into(),
            Immediate::Threads(asked) => report::threads(asked, work)?.into(),
            Immediate::Limit(asked) => report::limit(asked, work).into(),
            Immediate::Share(asked) => report::share(asked, files, work)?.into(),
            Immediate::Trace(asked) => report::trace(asked, work)?.into(),
            Immediate::Space(_) => {
                work.admission.may_have_space();
                work.condition().into()
            }
            Immediate::Watch(_) => {
                self.watchers.add(asker, work.condition());
                work.condition().into()
            }
            Immediate::MergeStatus(_) => self.merge_status().into(),
            Immediate::MergePause(_) => self.tell_merge(|merge| merge.stop(true))?.into(),
            Immediate::MergeResume(_) => self.tell_merge(|merge| merge.stop(false))?.into(),
            Immediate::MergeCancel(_) => self.tell_merge(MergeJob::cancel)?.into(),
        })
    }

    /// Begins a verb that takes several steps; returns the answer, if there is nothing to do.
    fn begin(
        &mut self,
        word: &'static str,
        verb: LongRunning,
        files: Handed,
        other: Option<OwnedFd>,
        asker: &Asker,
        work: &mut Work<'_>,
    ) -> Result<Option<Answer>, Failure> {
        self.must_be_possible(&verb, work)?;
        let at_hand = handed::opens_files(&verb).then(|| work.files.at_hand(files));
        let steps = match verb {
            LongRunning::Pause(_) | LongRunning::Resume(_) if self.paused == matches!(verb, LongRunning::Pause(_)) => {
                return Ok(Some(Paused { paused: self.paused, pause: None }.into()));
            }
            LongRunning::Pause(_) => Steps::Pausing(standstill::Pausing::begin()),
            LongRunning::Resume(_) => {
                self.paused = false;
                work.paused = false;
                Steps::Resuming
            }
            LongRunning::Snapshot(asked) => job::snapshot(asked, work)?,
            LongRunning::Revert(asked) => Steps::Revert(Box::new(revert::Revert::begin(asked, work)?)),
            LongRunning::Clone(asked) => Steps::Clone(clone::Clone::begin(asked, work)?),
            LongRunning::Track(asked) => Steps::Track(Box::new(track::Track::begin(asked, work)?)),
            LongRunning::Untrack(asked) => Steps::Track(Box::new(track::Track::end(asked, work)?)),
            LongRunning::Resize(asked) => Steps::Resize(resize::Resize::begin(asked.size, work)?),
            LongRunning::Merge(asked) => match finish::what_is_left(&asked, work)? {
                Some(finish) => Steps::Finish(finish),
                None => return self.begin_merging(asked, at_hand, asker, work).map(|()| None),
            },
            LongRunning::Upgrade(asked) => {
                Steps::Upgrade(Box::new(upgrade::Upgrade::begin(asked, other, &self.listener, work)?))
            }
        };
        self.job = Some((Job::new(word, steps, at_hand), asker.clone()));
        if let Some(client) = self.client(asker) {
            client.begin_reply();
        }
        self.go_on(work);
        Ok(None)
    }

    fn must_be_possible(&self, verb: &LongRunning, work: &Work<'_>) -> Result<(), Failure> {
        if self.stopping {
            return Err(Failure::of(Kind::State, "the disk is stopping"));
        }
        if let Some((job, _)) = &self.job {
            return Err(Failure::busy_with(job.verb()).advise("retry when it has ended"));
        }
        let is_pause = matches!(verb, LongRunning::Pause(_) | LongRunning::Resume(_));
        if !is_pause {
            work.must_be_local()?;
        }
        match &self.merging {
            Some(_) if matches!(verb, LongRunning::Upgrade(_)) => Ok(()),
            Some(merging) if !is_pause || merging.merge.is_switching() => {
                Err(Failure::busy_with("merge").advise("retry when it has ended, or use merge-cancel"))
            }
            None if self.paused && matches!(verb, LongRunning::Merge(_)) => {
                Err(Failure::of(Kind::State, "the disk is paused").advise("resume it first"))
            }
            _ => Ok(()),
        }
    }

    /// Sends a pending reply.
    fn reply(&mut self, asker: Option<&Asker>, outcome: Result<Answer, Failure>) {
        let Some(asker) = asker else { return };
        if let Some(client) = self.client(asker) {
            client.reply(&line(&asker.id, outcome));
        }
    }

    /// Drives the verb in progress.
    fn go_on(&mut self, work: &mut Work<'_>) {
        let Some((mut job, asker)) = self.job.take() else { return };
        panics::under_way(Some(job.verb()));
        if let Some(upgrade) = job.as_upgrade() {
            upgrade.merging(self.merging.is_some());
        }
        let outcome = match job.advance(work) {
            Ok(None) => {
                self.job = Some((job, asker));
                return;
            }
            Ok(Some(value)) => Ok(value),
            Err(refusal) => {
                job.undo(work);
                Err(refusal)
            }
        };
        if job.is_pausing() && outcome.is_ok() && !self.stopping {
            self.paused = true;
            work.paused = true;
        }
        if self.stopping {
            work.let_go();
        }
        if let (true, Ok(Answer::Merge(merged))) = (job.is_merging(), &outcome) {
            self.merged = Some(merged.clone());
        }
        // A client that receives the answer may reuse the passed files, and must not find them locked.
        drop(job);
        self.reply(Some(&asker), outcome);
    }
}

/// Formats the answer to a request.
fn line(id: &Id, outcome: Result<Answer, Failure>) -> String {
    outcome.map_or_else(|failure| Reply::Error(failure.into()), Reply::<_>::Ok).line(id)
}
