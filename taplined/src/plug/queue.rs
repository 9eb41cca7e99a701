//! The order in which VBDs are plugged and unplugged, as a function of requests and completions.
//!
//! A pure state machine: no clock, no thread, no I/O. Its owner calls [`Queue::next`] after every change until there is
//! nothing more. Invariants, whatever is requested in whatever order:
//!
//! - no more requests run than there are workers, no more per VM than its window, and no more than one per VBD;
//! - running requests need no more memory than there is; one that exceeds it alone runs alone;
//! - within a VM, writers come before readers, otherwise first come, first served;
//! - VMs take turns, so that one with 255 disks does not starve one with a single disk;
//! - a request that does not fit into memory is overtaken by others at most [`PASSED_MAX`] times, so it does not wait
//!   forever.

use std::collections::{HashMap, HashSet, VecDeque};

use api::{Limits, Mode};
use uuid::Uuid;

/// How many other requests may overtake one that waits for memory. Without a limit, an endless stream of small
/// requests starves a large one; with a limit of zero, a slow request with much memory delays all others.
const PASSED_MAX: u32 = 16;

/// A request to plug or unplug a VBD.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// The VBD.
    pub vbd: Uuid,
    /// Its VM. Disks of machines that are managed elsewhere have none: together they take turns like one VM, without
    /// a window.
    pub vm: Option<Uuid>,
    /// Whether it is for writing.
    pub mode: Mode,
    /// Bytes of memory that it needs.
    pub memory: u64,
}

/// The queue's identifier of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(u64);

/// Waiting and running requests.
#[derive(Debug)]
pub struct Queue {
    limits: Limits,
    last: u64,
    machines: HashMap<Option<Uuid>, VmQueue>,
    /// Machines with waiting requests, in the order of their turns.
    turns: VecDeque<Option<Uuid>>,
    under_way: HashMap<Ticket, Request>,
    /// The VBDs of the running requests.
    busy: HashSet<Uuid>,
    memory: u64,
}

/// The requests of a VM.
#[derive(Debug, Default)]
struct VmQueue {
    writers: VecDeque<Waiting>,
    readers: VecDeque<Waiting>,
    under_way: u32,
}

#[derive(Debug)]
struct Waiting {
    ticket: Ticket,
    request: Request,
    passed: u32,
}

/// What happens when it is a machine's turn.
enum TurnOutcome {
    /// This request starts.
    Begins(Ticket),
    /// Its first request that could start lacks memory.
    NoMemory,
    /// No request could be started.
    Nothing,
}

impl Queue {
    /// An empty queue.
    pub fn new(limits: Limits) -> Queue {
        Queue {
            limits,
            last: 0,
            machines: HashMap::new(),
            turns: VecDeque::new(),
            under_way: HashMap::new(),
            busy: HashSet::new(),
            memory: 0,
        }
    }

    /// Adds a request.
    pub fn add(&mut self, request: Request) -> Ticket {
        self.last = self.last.wrapping_add(1);
        let ticket = Ticket(self.last);
        // A request larger than all memory is given all of it, and thus runs alone. That requires every request to
        // need some.
        let request = Request { memory: request.memory.max(1).min(self.limits.worker_memory), ..request };
        let machine = self.machines.entry(request.vm).or_default();
        if machine.waits() == 0 {
            self.turns.push_back(request.vm);
        }
        machine.line(request.mode).push_back(Waiting { ticket, request, passed: 0 });
        ticket
    }

    /// Starts the next request, if one may start.
    pub fn next(&mut self) -> Option<Ticket> {
        if self.under_way.len() >= self.limits.worker_pool_size as usize {
            return None;
        }
        let mut first_without_memory = None;
        for at in 0..self.turns.len() {
            let vm = *self.turns.get(at)?;
            match self.turn_of(vm) {
                TurnOutcome::Begins(ticket) => {
                    self.pass(first_without_memory);
                    self.turns.remove(at);
                    self.begin(vm, ticket);
                    return Some(ticket);
                }
                TurnOutcome::NoMemory if first_without_memory.is_none() => {
                    if self.passed(vm) >= PASSED_MAX {
                        return None;
                    }
                    first_without_memory = Some(vm);
                }
                TurnOutcome::NoMemory | TurnOutcome::Nothing => {}
            }
        }
        None
    }

    /// Removes a request that has ended or was given up.
    pub fn end(&mut self, ticket: Ticket) {
        if let Some(request) = self.under_way.remove(&ticket) {
            self.busy.remove(&request.vbd);
            self.memory = self.memory.saturating_sub(request.memory);
            if let Some(machine) = self.machines.get_mut(&request.vm) {
                machine.under_way = machine.under_way.saturating_sub(1);
            }
        } else {
            for machine in self.machines.values_mut() {
                machine.writers.retain(|waiting| waiting.ticket != ticket);
                machine.readers.retain(|waiting| waiting.ticket != ticket);
            }
            self.turns.retain(|vm| self.machines.get(vm).is_some_and(|machine| machine.waits() > 0));
        }
        self.machines.retain(|_, machine| machine.waits() > 0 || machine.under_way > 0);
    }

    /// What happens if it is this machine's turn.
    fn turn_of(&self, vm: Option<Uuid>) -> TurnOutcome {
        let Some(machine) = self.machines.get(&vm) else { return TurnOutcome::Nothing };
        if vm.is_some() && machine.under_way >= self.limits.plug_window {
            return TurnOutcome::Nothing;
        }
        match self.first(machine) {
            None => TurnOutcome::Nothing,
            Some(waiting) if self.fits(waiting.request.memory) => TurnOutcome::Begins(waiting.ticket),
            Some(_) => TurnOutcome::NoMemory,
        }
    }

    /// The first request of a machine whose VBD has no other one running.
    fn first<'a>(&self, machine: &'a VmQueue) -> Option<&'a Waiting> {
        let mut all = machine.writers.iter().chain(&machine.readers);
        all.find(|waiting| !self.busy.contains(&waiting.request.vbd))
    }

    fn fits(&self, memory: u64) -> bool {
        self.memory.saturating_add(memory) <= self.limits.worker_memory
    }

    /// How often the machine's first request was overtaken.
    fn passed(&self, vm: Option<Uuid>) -> u32 {
        let first = self.machines.get(&vm).and_then(|machine| self.first(machine));
        first.map_or(0, |waiting| waiting.passed)
    }

    /// Counts that the machine's first request was overtaken.
    fn pass(&mut self, vm: Option<Option<Uuid>>) {
        let Some(machine) = vm.and_then(|vm| self.machines.get_mut(&vm)) else { return };
        let mut all = machine.writers.iter_mut().chain(&mut machine.readers);
        if let Some(waiting) = all.find(|waiting| !self.busy.contains(&waiting.request.vbd)) {
            waiting.passed = waiting.passed.saturating_add(1);
        }
    }

    /// Starts a request of a machine that has had its turn.
    fn begin(&mut self, vm: Option<Uuid>, ticket: Ticket) {
        let Some(machine) = self.machines.get_mut(&vm) else { return };
        let Some(request) = machine.take(ticket) else { return };
        machine.under_way = machine.under_way.saturating_add(1);
        if machine.waits() > 0 {
            self.turns.push_back(vm);
        }
        self.busy.insert(request.vbd);
        self.memory = self.memory.saturating_add(request.memory);
        self.under_way.insert(ticket, request);
    }
}

impl VmQueue {
    fn line(&mut self, mode: Mode) -> &mut VecDeque<Waiting> {
        match mode {
            Mode::ReadWrite => &mut self.writers,
            Mode::ReadOnly => &mut self.readers,
        }
    }

    fn waits(&self) -> usize {
        self.writers.len().saturating_add(self.readers.len())
    }

    fn take(&mut self, ticket: Ticket) -> Option<Request> {
        for line in [&mut self.writers, &mut self.readers] {
            if let Some(at) = line.iter().position(|waiting| waiting.ticket == ticket) {
                return line.remove(at).map(|waiting| waiting.request);
            }
        }
        None
    }
}

#[cfg(test)]
mod test;
