//! Faults: processes are killed or stopped, file systems are filled, and older catalogues are restored.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use super::bed::Full;
use super::check::{names_in, text};
use super::limits::Qos;
use super::verbs::patience;
use super::world::{Vbd, World};

/// The catalogue's files: committed data may still be in the WAL.
const FILES: [&str; 3] = ["catalogue.db", "catalogue.db-wal", "catalogue.db-shm"];

/// An older catalogue.
#[derive(Debug)]
pub struct Backup {
    kept: KeptCatalogue,
    /// The VMs that it contains.
    vms: BTreeSet<String>,
}

/// The form of a kept catalogue.
#[derive(Debug)]
enum KeptCatalogue {
    /// Copies of the files, taken while no daemon ran.
    Files([Option<Vec<u8>>; 3]),
    /// A backup of the daemon, by its path, and a copy of it, because the daemon keeps only a few.
    Made(PathBuf, PathBuf),
}

impl World {
    /// Records a fault, with which failures may be excused.
    pub fn trouble(&mut self, what: &str, words: String) {
        self.troubled = true;
        self.count(what);
        self.log(words);
    }

    /// Waits for a short random time.
    fn soon(&mut self) {
        if self.random.below(2) == 0 {
            std::thread::sleep(Duration::from_micros(self.random.below(30_000)));
        }
    }

    /// Kills the daemon; it stays down for a while.
    pub fn kill_daemon(&mut self) -> Result<(), String> {
        if self.down {
            return Ok(());
        }
        self.soon();
        self.trouble("kill daemon", "kill the daemon".into());
        self.counts.kills += 1;
        self.bed.daemon()?.kill()?;
        self.down = true;
        Ok(())
    }

    /// Lets the daemon die at a random step of some task.
    pub fn arm(&mut self, steps: &[String]) -> Result<(), String> {
        let Some(step) = self.one_of(steps) else { return Ok(()) };
        let step = if self.random.below(2) == 0 { step } else { format!("{step}:after") };
        self.die_at(step)
    }

    /// Lets the daemon die at this step.
    pub fn die_at(&mut self, step: String) -> Result<(), String> {
        if self.bed.is_full() {
            return Ok(());
        }
        self.kill_daemon()?;
        self.trouble("abort at", format!("start a daemon that dies at {step}"));
        self.dies_at = Some(step.clone());
        self.bed.daemon()?.launch_with(&[("TAPLINED_ABORT_AT", step.as_str())])?;
        // It may die before it listens, when it completes tasks.
        self.down = self.bed.daemon()?.until_it_listens().is_err();
        if self.down {
            self.counts.kills += 1;
        }
        Ok(())
    }

    /// Kills the process of a disk, sometimes with a write in flight.
    pub fn kill_disk(&mut self) -> Result<(), String> {
        let Some(vbd) = self.usable_vbd() else { return Ok(()) };
        // Sent before the fault is recorded, so it must succeed.
        if self.random.below(2) == 0 {
            self.send_write(&vbd)?;
        }
        self.soon();
        let disks = self.bed.places.disks();
        let pid = disks.iter().find(|disk| disk.vbd.as_ref() == Some(&vbd)).map(|disk| disk.pid);
        self.trouble("kill disk", format!("kill {pid:?}, the disk of VBD {vbd}"));
        if let Some(pid) = pid {
            self.counts.kills += 1;
            self.bed.places.kill(pid)?;
        }
        self.take_answer(&vbd)?;
        self.vbd(&vbd)?.client = None;
        Ok(())
    }

    /// Kills whatever process serves a VBD as soon as it appears, more often than a disk would die by chance.
    pub fn kill_repeatedly(&mut self) -> Result<(), String> {
        let Some(vbd) = self.usable_vbd() else { return Ok(()) };
        if self.down || self.bed.is_full() {
            return Ok(());
        }
        // The disk must also recover without space for its log.
        let full = self.random_is(2);
        if full {
            self.bed.fill(Full::Log)?;
        }
        self.trouble("kill again", format!("kill the disk of VBD {vbd} seven times; no space for logs: {full}"));
        let mut before = None;
        for _ in 0..7 {
            let begun = Instant::now();
            let pid = loop {
                let shown = self.get(&format!("/vbds/{vbd}"))?;
                let pid = shown["pid"].as_u64().and_then(|pid| u32::try_from(pid).ok());
                match pid.filter(|pid| Some(*pid) != before && shown["state"] == "plugged") {
                    Some(pid) => break pid,
                    None if begun.elapsed() > patience() => {
                        return Err(format!("stuck, a disk that has died is not started again: {shown}"));
                    }
                    None => std::thread::sleep(Duration::from_millis(5)),
                }
            };
            self.counts.kills += 1;
            self.bed.places.kill(pid)?;
            before = Some(pid);
        }
        self.vbd(&vbd)?.client = None;
        Ok(())
    }

    /// Kills a process that works on an image, if there is one.
    pub fn kill_job(&mut self) -> Result<(), String> {
        let Some(pid) = self.some_job() else { return Ok(()) };
        self.trouble("kill job", format!("kill {pid}, which works on an image"));
        self.counts.kills += 1;
        self.bed.places.kill(pid)
    }

    /// A process that works on an image, if one appears soon.
    pub fn some_job(&self) -> Option<u32> {
        for _ in 0..20 {
            if let Some(job) = self.bed.places.disks().into_iter().find(|disk| disk.vbd.is_none()) {
                return Some(job.pid);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        None
    }

    /// Stops the process of a disk.
    pub fn stop_disk(&mut self) -> Result<(), String> {
        let Some(vbd) = self.usable_vbd() else { return Ok(()) };
        let disks = self.bed.places.disks();
        let Some(disk) = disks.iter().find(|disk| disk.vbd.as_ref() == Some(&vbd)) else { return Ok(()) };
        self.trouble("stop disk", format!("stop {}, the disk of VBD {vbd}", disk.pid));
        self.bed.places.signal(disk.pid, Signal::STOP)?;
        self.vbd(&vbd)?.stopped = Some(disk.pid);
        self.send_write(&vbd)
    }

    /// Fills a random file system.
    pub fn fill(&mut self) -> Result<(), String> {
        let all = [Full::State, Full::Run, Full::Log, Full::Sr(0), Full::Sr(2)];
        let Some(which) = self.one_of(&all) else { return Ok(()) };
        if self.bed.is_full() {
            return self.relieve();
        }
        self.trouble("fill", format!("no space: {which:?}"));
        self.bed.fill(which)
    }

    /// Frees all space; requests that wait for it are answered.
    pub fn relieve(&mut self) -> Result<(), String> {
        if self.bed.is_full() {
            self.log("there is space again");
            self.bed.relieve()?;
        }
        Ok(())
    }

    /// Ends all faults that keep something from completing.
    pub fn calm(&mut self) -> Result<(), String> {
        self.relieve()?;
        self.continue_stopped()?;
        if self.dies_at.is_some() {
            self.kill_daemon()?;
        }
        self.ensure_daemon()?;
        for vbd in self.vbds.keys().cloned().collect::<Vec<_>>() {
            self.take_answer(&vbd)?;
        }
        Ok(())
    }

    /// Continues disks that were stopped.
    pub fn continue_stopped(&mut self) -> Result<(), String> {
        for pid in std::mem::take(&mut self.stopped) {
            self.log(format!("continue {pid}"));
            self.bed.places.signal(pid, Signal::CONT)?;
        }
        for vbd in self.vbds.keys().cloned().collect::<Vec<_>>() {
            if let Some(pid) = self.vbd(&vbd)?.stopped.take() {
                self.log(format!("continue {pid}"));
                self.bed.places.signal(pid, Signal::CONT)?;
            }
        }
        Ok(())
    }

    fn catalogue(&self) -> [PathBuf; 3] {
        FILES.map(|name| self.bed.places.room.join("state").join(name))
    }

    /// Keeps a copy of the catalogue.
    pub fn back_up(&mut self) -> Result<(), String> {
        self.rest()?;
        let kept = match self.random_is(2) {
            true => {
                let made = self.bed.api.ask("POST", "/host/backups", &serde_json::json!({}))?;
                let made = PathBuf::from(text(&made["file"]));
                let copy = self.bed.places.room.join("kept.db");
                fs::copy(&made, &copy).map_err(|error| format!("copy {}: {error}", made.display()))?;
                self.log(format!("the daemon keeps its catalogue as {}", made.display()));
                KeptCatalogue::Made(made, copy)
            }
            false => {
                self.kill_daemon()?;
                KeptCatalogue::Files(self.catalogue().map(|path| fs::read(path).ok()))
            }
        };
        self.trouble("back up", "the catalogue is kept".into());
        self.backup = Some(Backup { kept, vms: self.vms.keys().cloned().collect() });
        self.ensure_daemon()
    }

    /// Changes 20 bytes of the catalogue: the daemon must refuse to start, or report correct data. Then the original is
    /// restored.
    pub fn damage(&mut self) -> Result<(), String> {
        self.check()?;
        self.kill_daemon()?;
        let [path, ..] = self.catalogue();
        let kept = self.catalogue().map(|path| fs::read(path).ok());
        let mut bytes = fs::read(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        let at = self.random.index(bytes.len().saturating_sub(20));
        for byte in bytes.iter_mut().skip(at).take(20) {
            *byte ^= 0x5a;
        }
        fs::write(&path, &bytes).map_err(|error| format!("{}: {error}", path.display()))?;
        self.trouble("damage", format!("20 bytes of the catalogue are changed, from {at} on"));
        let mut said = Ok(());
        if self.bed.daemon()?.restart().is_ok() {
            self.down = false;
            // It may notice later and exit.
            self.dies_at = Some("damage".into());
            said = match self.compare_lists() {
                Err(_) if self.bed.api.ask("GET", "/host", &serde_json::Value::Null).is_err() => Ok(()),
                compared => compared.map_err(|why| format!("a damaged catalogue (at {at}) is served: {why}")),
            };
            self.wait_for_tasks();
            self.kill_daemon()?;
        }
        self.write_catalogue(&kept)?;
        said?;
        // The daemon may have begun merges that are unknown to the original catalogue: the model follows those that
        // have ended, and ignores their files.
        self.ensure_daemon()?;
        self.rest()?;
        self.remove_unnamed()
    }

    /// Waits until a daemon that may exit at any time has no task in progress.
    fn wait_for_tasks(&mut self) {
        let begun = Instant::now();
        let mut quiet = 0;
        while quiet < 3 && begun.elapsed() < patience() {
            match self.list("/tasks?open=true") {
                Ok(open) if open.is_empty() => quiet += 1,
                Ok(_) => quiet = 0,
                Err(_) => return,
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Restores a catalogue while no daemon runs. If it is the latest backup, it need not be named.
    fn restore(&mut self, kept: &KeptCatalogue) -> Result<(), String> {
        let (made, copy) = match kept {
            KeptCatalogue::Files(files) => return self.write_catalogue(files),
            KeptCatalogue::Made(made, copy) => (made, copy),
        };
        let at = made.parent().ok_or("a backup without a directory")?;
        let newest = names_in(at)?.into_iter().next_back();
        let from = match newest.as_deref() == made.file_name().and_then(|name| name.to_str()) {
            true => "latest".to_owned(),
            false => copy.display().to_string(),
        };
        let said = self.bed.daemon()?.once(&["--restore".to_owned(), from])?;
        self.log(said);
        Ok(())
    }

    /// Removes the catalogue, as if its file system were not mounted.
    pub fn remove_catalogue(&self) -> Result<(), String> {
        self.write_catalogue(&[None, None, None])
    }

    fn write_catalogue(&self, files: &[Option<Vec<u8>>; 3]) -> Result<(), String> {
        for (path, bytes) in self.catalogue().iter().zip(files) {
            let done = match bytes {
                Some(bytes) => fs::write(path, bytes),
                None => fs::remove_file(path).or_else(|error| match error.kind() {
                    std::io::ErrorKind::NotFound => Ok(()),
                    _ => Err(error),
                }),
            };
            done.map_err(|error| format!("{}: {error}", path.display()))?;
        }
        Ok(())
    }

    /// Restores the catalogue that was kept. Repositories and running disks take precedence over it; unplugged VBDs are
    /// as they were then.
    pub fn put_back(&mut self) -> Result<(), String> {
        let Some(backup) = self.backup.take() else { return self.back_up() };
        self.check()?;
        // The QEMU of an unknown VM could not be stopped.
        for vm in self.vms.keys().filter(|vm| !backup.vms.contains(*vm)).cloned().collect::<Vec<_>>() {
            self.delete_machine(&vm)?;
        }
        self.kill_daemon()?;
        self.trouble("put back", "the catalogue that was kept is put back".into());
        self.restore(&backup.kept)?;
        self.ensure_daemon()?;
        self.tokens = self.shown_tokens()?;
        self.unplug_destroyed()?;
        self.rest()?;
        self.follow_machines()?;
        self.follow_vbds()
    }

    /// Unplugs VBDs that are plugged in an older catalogue but whose VDIs were destroyed since: their disks cannot
    /// start and would be retried forever.
    fn unplug_destroyed(&mut self) -> Result<(), String> {
        let mut gone = BTreeSet::new();
        for vbd in self.list("/vbds")? {
            let (uuid, vdi) = (text(&vbd["uuid"]), text(&vbd["vdi"]));
            if self.vdis.contains_key(&vdi) {
                continue;
            }
            let plugged = vbd["state"] != "unplugged";
            self.vbds.insert(uuid.clone(), Vbd { vdi: vdi.clone(), plugged, ..Vbd::default() });
            self.delete_vbd(&uuid)?;
            gone.insert(vdi);
        }
        // Several VBDs may be of the same VDI.
        gone.iter().try_for_each(|vdi| self.drop_missing(vdi))
    }

    /// Takes the VBDs from the daemon; plugged ones must stay plugged.
    fn follow_vbds(&mut self) -> Result<(), String> {
        let shown = self.list("/vbds")?;
        for uuid in self.vbds.keys().cloned().collect::<Vec<_>>() {
            let now = shown.iter().find(|vbd| vbd["uuid"] == *uuid);
            let plugged = now.is_some_and(|vbd| vbd["state"] == "plugged");
            if self.vbd(&uuid)?.plugged && !plugged {
                return Err(format!("VBD {uuid} was plugged, and with an older catalogue it is {now:?}"));
            }
            match now {
                Some(now) => {
                    let (autostart, qos) = (now["autostart"].is_object(), Qos::parse(now));
                    let vbd = self.vbd(&uuid)?;
                    (vbd.plugged, vbd.autostart, vbd.qos) = (plugged, autostart, qos);
                }
                None => drop(self.vbds.remove(&uuid)),
            }
        }
        for vbd in &shown {
            let uuid = text(&vbd["uuid"]);
            if self.vbds.contains_key(&uuid) {
                continue;
            }
            let new = Vbd {
                vdi: text(&vbd["vdi"]),
                vm: vbd["vm"].as_str().map(str::to_owned),
                position: vbd["position"].as_u64().unwrap_or(0),
                autostart: vbd["autostart"].is_object(),
                qos: Qos::parse(vbd),
                plugged: vbd["state"] == "plugged",
                ..Vbd::default()
            };
            self.vbds.insert(uuid, new);
        }
        Ok(())
    }
}
