//! Virtual machines.

use api::{Change, Code, Labels, ObjectKind, Power, Problem, Vbd, VbdState, Vm, VmPatch, VmShutdown};
use rusqlite::{Row, named_params};
use uuid::Uuid;

use super::name::Among;
use super::row::{Id, Json, Time, Word, labels, text};
use super::vbd::Process;
use super::vm_memory::VmMemory;
use super::{Tx, View, not_found};

/// Each VM, whether it has a seed, and its saved memory.
const SELECT: &str = "SELECT vm.*, EXISTS (SELECT 1 FROM seed WHERE seed.vm = vm.uuid) AS seeded,
    (SELECT memory FROM vm_memory WHERE vm_memory.vm = vm.uuid) AS saved FROM vm";

/// The process of a VM: it outlives daemons, and must be identified even after a reboot of the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VmProcess {
    /// Its number and its start.
    pub process: Process,
    /// The boot of the host to which the start time is relative.
    pub boot: String,
}

fn of_row(row: &Row<'_>) -> rusqlite::Result<Vm> {
    let Labels { tags, other_config } = labels(row)?;
    Ok(Vm {
        uuid: row.get::<_, Id>("uuid")?.0,
        name: text(row, "name")?,
        description: text(row, "description")?,
        tags,
        other_config,
        driver: row.get::<_, Word<_>>("driver")?.0,
        memory: row.get("memory")?,
        vcpus: row.get("vcpus")?,
        boot: row.get::<_, Json<_>>("boot")?.0,
        platform: row.get::<_, Json<_>>("platform")?.0,
        autostart: row.get::<_, Option<Json<_>>>("autostart")?.map(|json| json.0),
        retention: row.get::<_, Option<Json<_>>>("retention")?.map(|json| json.0),
        retention_problem: row.get::<_, Option<Json<_>>>("retention_problem")?.map(|json| json.0),
        backup_schedule: row.get::<_, Option<Json<_>>>("backup_schedule")?.map(|json| json.0),
        last_backup: row.get::<_, Option<Time>>("last_backup")?.map(|time| time.0),
        backup_problem: row.get::<_, Option<Json<_>>>("backup_problem")?.map(|json| json.0),
        seed: row.get("seeded")?,
        power: row.get::<_, Word<_>>("power")?.0,
        suspended: row.get::<_, Option<Json<VmMemory>>>("saved")?.map(|json| json.0.shown()),
        pid: row.get("pid")?,
        handle: row.get("handle")?,
        problem: row.get::<_, Option<Json<_>>>("problem")?.map(|json| json.0),
        created: row.get::<_, Time>("created")?.0,
    })
}

impl View<'_> {
    /// All VMs, by name.
    pub fn vms(&self) -> Result<Vec<Vm>, Problem> {
        self.rows(&format!("{SELECT} ORDER BY name, uuid"), [], of_row)
    }

    /// A VM, if there is one.
    pub fn find_vm(&self, uuid: Uuid) -> Result<Option<Vm>, Problem> {
        self.row(&format!("{SELECT} WHERE uuid = ?1"), [Id(uuid)], of_row)
    }

    /// A VM; an error if there is none with this UUID.
    pub fn vm(&self, uuid: Uuid) -> Result<Vm, Problem> {
        self.find_vm(uuid)?.ok_or_else(|| not_found(ObjectKind::Vm, uuid))
    }

    /// The VMs that have a schedule of snapshots.
    pub fn scheduled_vms(&self) -> Result<Vec<Vm>, Problem> {
        self.rows(&format!("{SELECT} WHERE vm.retention IS NOT NULL ORDER BY vm.uuid"), [], of_row)
    }

    /// The VMs that have a schedule of backups.
    pub fn vms_to_back_up(&self) -> Result<Vec<Vm>, Problem> {
        self.rows(&format!("{SELECT} WHERE vm.backup_schedule IS NOT NULL ORDER BY vm.uuid"), [], of_row)
    }

    /// The process of a VM, if it has one.
    pub fn vm_process(&self, uuid: Uuid) -> Result<Option<VmProcess>, Problem> {
        let sql = "SELECT pid, pid_started, pid_boot FROM vm WHERE uuid = ?1 AND pid IS NOT NULL";
        self.row(sql, [Id(uuid)], |row| {
            Ok(VmProcess { process: Process { pid: row.get(0)?, started: row.get(1)? }, boot: row.get(2)? })
        })
    }

    /// The request by which a VM is stopping. None if it is stopping for another reason.
    pub fn vm_shutdown(&self, uuid: Uuid) -> Result<Option<VmShutdown>, Problem> {
        let sql = "SELECT shutdown FROM vm WHERE uuid = ?1";
        let asked = self.row(sql, [Id(uuid)], |row| row.get::<_, Option<Json<_>>>(0))?;
        Ok(asked.flatten().map(|json| json.0))
    }

    /// Refuses to plug a VBD individually while its VM is being started or shut down, which handles all of them.
    pub fn check_vm_settled(&self, vbd: &Vbd) -> Result<(), Problem> {
        let power = vbd.vm.map(|vm| self.vm(vm)).transpose()?.map(|vm| vm.power);
        let doing = match power {
            Some(Power::Starting) => "started",
            Some(Power::Stopping) => "shut down",
            Some(Power::Suspended) => {
                return vbd.vm.map_or(Ok(()), |vm| self.check_not_suspended(vm, "its disks cannot be plugged"));
            }
            _ => return Ok(()),
        };
        let what = format!("the VM of VBD {} is being {doing}", vbd.uuid);
        Err(Problem::new(Code::Busy, what).advise("wait for that task or cancel it"))
    }
}

impl Tx<'_> {
    /// Adds a VM, which does not run.
    pub fn add_vm(&mut self, vm: &Vm) -> Result<(), Problem> {
        self.check_name_free(Among::Vms, &vm.name, &format!("create VM '{}'", vm.name))?;
        self.insert_vm(vm)
    }

    /// The same for a name that was checked when it was chosen.
    pub fn insert_vm(&mut self, vm: &Vm) -> Result<(), Problem> {
        self.execute(
            "INSERT INTO vm VALUES (:uuid, :name, :description, :driver, :memory, :vcpus, :boot, :platform, :power,
             NULL, NULL, NULL, NULL, NULL, :created, :autostart, :tags, :other_config, NULL, :retention, NULL, NULL,
             NULL, NULL, NULL)",
            named_params! {
                ":uuid": Id(vm.uuid), ":name": vm.name.as_str(), ":description": vm.description.as_str(),
                ":driver": Word(vm.driver), ":memory": vm.memory, ":vcpus": vm.vcpus, ":boot": Json(&vm.boot),
                ":platform": Json(&vm.platform), ":power": Word(vm.power), ":created": Time(vm.created),
                ":autostart": vm.autostart.map(Json), ":tags": Json(&vm.tags),
                ":other_config": Json(&vm.other_config), ":retention": vm.retention.map(Json),
            },
        )?;
        self.touch(ObjectKind::Vm, vm.uuid, Change::Added);
        Ok(())
    }

    /// Changes a VM: its hardware only while it is halted.
    pub fn patch_vm(&mut self, uuid: Uuid, patch: &VmPatch) -> Result<Vm, Problem> {
        let mut vm = self.vm(uuid)?;
        let hardware = patch.memory.is_some()
            || patch.vcpus.is_some()
            || patch.boot.is_some()
            || patch.platform.is_some()
            || patch.seed.is_some();
        if hardware {
            self.check_not_suspended(uuid, "its hardware cannot be changed")?;
        }
        if hardware && vm.power != Power::Halted {
            let what = format!("the hardware of VM {uuid} can only be changed while it is halted");
            return Err(Problem::new(Code::State, what).advise("shut it down first"));
        }
        if let Some(name) = patch.name.as_ref().filter(|name| **name != vm.name) {
            self.check_name_free(Among::Vms, name, &format!("rename VM {uuid} to '{name}'"))?;
        }
        vm.name = patch.name.clone().unwrap_or(vm.name);
        vm.description = patch.description.clone().unwrap_or(vm.description);
        vm.tags = patch.tags.clone().unwrap_or(vm.tags);
        vm.other_config = patch.other_config.clone().unwrap_or(vm.other_config);
        vm.memory = patch.memory.map_or(vm.memory, api::Size::bytes);
        vm.vcpus = patch.vcpus.map_or(vm.vcpus, u32::from);
        vm.boot = patch.boot.clone().unwrap_or(vm.boot);
        vm.platform = patch.platform.clone().unwrap_or(vm.platform);
        vm.autostart = patch.autostart.unwrap_or(vm.autostart);
        if let Some(retention) = patch.retention {
            // Why the schedule before could not be followed says nothing of this one.
            (vm.retention, vm.retention_problem) = (retention, None);
        }
        self.execute(
            "UPDATE vm SET name = :name, description = :description, memory = :memory, vcpus = :vcpus, boot = :boot,
             platform = :platform, autostart = :autostart, tags = :tags, other_config = :other_config,
             retention = :retention, retention_problem = :retention_problem WHERE uuid = :uuid",
            named_params! {
                ":uuid": Id(uuid), ":name": vm.name.as_str(), ":description": vm.description.as_str(),
                ":memory": vm.memory, ":vcpus": vm.vcpus, ":boot": Json(&vm.boot), ":platform": Json(&vm.platform),
                ":autostart": vm.autostart.map(Json), ":tags": Json(&vm.tags),
                ":other_config": Json(&vm.other_config), ":retention": vm.retention.map(Json),
                ":retention_problem": vm.retention_problem.as_ref().map(Json),
            },
        )?;
        if let Some(schedule) = patch.backup_schedule {
            self.set_backup_schedule(ObjectKind::Vm, uuid, (vm.backup_schedule, schedule))?;
            vm = self.vm(uuid)?;
        }
        if let Some(seed) = &patch.seed {
            self.set_seed(uuid, seed.as_ref())?;
            vm.seed = seed.is_some();
        }
        if patch.autostart == Some(None) {
            self.end_start(uuid)?;
        }
        self.touch(ObjectKind::Vm, uuid, Change::Changed);
        Ok(vm)
    }

    /// A VM that is halted or suspended begins to be started; these are its VBDs. None of them may be half way.
    pub fn begin_vm_start(&mut self, uuid: Uuid) -> Result<(Vm, Vec<Vbd>), Problem> {
        let vm = self.vm(uuid)?;
        if !matches!(vm.power, Power::Halted | Power::Suspended) {
            return Err(Problem::new(Code::State, format!("VM {uuid} is not halted")));
        }
        let vbds = self.vbds(Some(uuid), None)?;
        let on_the_way = |vbd: &&Vbd| matches!(vbd.state, VbdState::Plugging | VbdState::Unplugging);
        if let Some(vbd) = vbds.iter().find(on_the_way) {
            let what = format!("VBD {} of VM {uuid} is being plugged or unplugged", vbd.uuid);
            return Err(Problem::new(Code::Busy, what).advise("wait for that task or cancel it"));
        }
        self.set_vm_power(uuid, Power::Starting, None)?;
        Ok((vm, vbds))
    }

    /// Records why a snapshot of a VM that was due by its schedule was not taken, or that one was. Not of a VM without
    /// a schedule: it may have ended meanwhile, and the VM too.
    pub fn set_vm_retention_problem(&mut self, uuid: Uuid, problem: Option<&Problem>) -> Result<(), Problem> {
        let known = self.find_vm(uuid)?.filter(|vm| vm.retention.is_some());
        if known.is_some_and(|vm| vm.retention_problem.as_ref() != problem) {
            self.execute("UPDATE vm SET retention_problem = ?2 WHERE uuid = ?1", (Id(uuid), problem.map(Json)))?;
            self.touch(ObjectKind::Vm, uuid, Change::Changed);
        }
        Ok(())
    }

    /// Records whether a VM runs, and why it does not.
    pub fn set_vm_power(&mut self, uuid: Uuid, power: Power, problem: Option<&Problem>) -> Result<(), Problem> {
        self.vm(uuid)?;
        self.execute(
            "UPDATE vm SET power = ?2, problem = ?3,
             held_for = CASE WHEN ?2 IN ('halted', 'suspended') THEN NULL ELSE held_for END,
             shutdown = CASE WHEN ?2 = 'stopping' THEN shutdown ELSE NULL END
             WHERE uuid = ?1",
            (Id(uuid), Word(power), problem.map(Json)),
        )?;
        self.touch(ObjectKind::Vm, uuid, Change::Changed);
        Ok(())
    }

    /// Records that a VM is being shut down, and how, so that a daemon that restarts continues in the same way.
    pub fn set_vm_stopping(&mut self, uuid: Uuid, asked: &VmShutdown) -> Result<(), Problem> {
        self.set_vm_power(uuid, Power::Stopping, None)?;
        self.execute("UPDATE vm SET shutdown = ?2 WHERE uuid = ?1", (Id(uuid), Json(asked))).map(drop)
    }

    /// Records that no machine of a VM runs any more, and why: it is suspended if its memory was saved.
    pub fn set_vm_down(&mut self, uuid: Uuid, problem: Option<&Problem>) -> Result<(), Problem> {
        let power = if self.vm_memory(uuid)?.is_some() { Power::Suspended } else { Power::Halted };
        self.set_vm_power(uuid, power, problem)
    }

    /// Records by which process a VM is run and where that is spoken to.
    pub fn set_vm_run_by(&mut self, uuid: Uuid, by: Option<&VmProcess>, handle: Option<&str>) -> Result<(), Problem> {
        self.vm(uuid)?;
        let process = by.map(|by| by.process);
        self.execute(
            "UPDATE vm SET pid = ?2, pid_started = ?3, pid_boot = ?4, handle = ?5 WHERE uuid = ?1",
            (Id(uuid), process.map(|by| by.pid), process.map(|by| by.started), by.map(|by| by.boot.as_str()), handle),
        )?;
        self.touch(ObjectKind::Vm, uuid, Change::Changed);
        Ok(())
    }

    /// Forgets a VM that is halted or suspended, with its VBDs, its snapshots and its memory. Those of its disks stay.
    pub fn remove_vm(&mut self, uuid: Uuid) -> Result<(), Problem> {
        let vm = self.vm(uuid)?;
        if !matches!(vm.power, Power::Halted | Power::Suspended) {
            let what = format!("VM {uuid} is not halted");
            return Err(Problem::new(Code::State, what).advise("shut it down first"));
        }
        if self.forget_vm_memory(uuid)?.is_some() {
            self.set_vm_power(uuid, Power::Halted, None)?;
        }
        for vbd in self.vbds(Some(uuid), None)? {
            self.remove_vbd(vbd.uuid)?;
        }
        self.execute("DELETE FROM vm_snapshot WHERE vm = ?1", [Id(uuid)])?;
        self.set_seed(uuid, None)?;
        self.execute("DELETE FROM vm WHERE uuid = ?1", [Id(uuid)])?;
        self.touch(ObjectKind::Vm, uuid, Change::Removed);
        Ok(())
    }
}
