//! Limits of disks, and their weights among those that share a storage: as they were set, they are in the API and in
//! the process that serves the disk, whichever of the two was killed meanwhile.

use serde_json::{Value, json};
use testbed::daemon::api::Trouble;

use super::verbs::NO_TASK;
use super::world::World;

/// What was set of a disk.
#[derive(Clone, Debug, PartialEq)]
pub struct Qos {
    /// Its limits, by name; an empty object is none.
    pub limits: Value,
    pub weight: u64,
}

impl Default for Qos {
    fn default() -> Qos {
        Qos { limits: json!({}), weight: 100 }
    }
}

impl Qos {
    /// As a VBD shows it.
    pub fn shown(vbd: &Value) -> Qos {
        let limits = if vbd["limits"].is_object() { vbd["limits"].clone() } else { json!({}) };
        Qos { limits, weight: vbd["share_weight"].as_u64().unwrap_or(0) }
    }

    /// Whether both are the same; how much is saved up is 100 milliseconds where nothing is said.
    fn is(&self, other: &Qos) -> bool {
        let limits = |qos: &Qos| {
            let mut limits = qos.limits.as_object().cloned().unwrap_or_default();
            limits.retain(|name, value| !(value.is_null() || name == "burst_ms" && *value == 100));
            limits
        };
        self.weight == other.weight && limits(self) == limits(other)
    }
}

impl World {
    /// Sets other limits of a disk or another weight, whether it is plugged or not.
    pub fn set_qos(&mut self) -> Result<(), String> {
        let held = self.held();
        let is_held = |name: &String| held.contains(name);
        let free = self.vbds.iter().filter(|(_, vbd)| !is_held(&vbd.vdi) && !vbd.vm.as_ref().is_some_and(is_held));
        let free: Vec<String> = free.map(|(uuid, _)| uuid.clone()).collect();
        let Some(vbd) = self.one_of(&free) else { return Ok(()) };
        let before = self.vbd(&vbd)?.qos.clone();
        let (verb, body, after) = if self.random_is(2) {
            let weight = 1 + self.random.below(1000);
            ("share", json!({ "weight": weight }), Qos { weight, ..before.clone() })
        } else {
            // High enough that nothing has to wait long for them.
            let limits = match self.random.below(4) {
                0 => json!({}),
                1 => json!({ "iops": 20_000 + self.random.below(1000) }),
                2 => json!({ "bandwidth": (1 << 30) + self.random.below(1000), "burst_ms": 500 }),
                _ => json!({ "write_iops": 20_000 + self.random.below(1000), "read_bandwidth": 1 << 30 }),
            };
            ("limit", limits.clone(), Qos { limits, ..before.clone() })
        };
        self.must_run()?;
        let path = format!("/vbds/{vbd}/{verb}");
        self.tell(format!("POST {path} {body}"));
        self.count("limit");
        let key = self.random_is(3).then(|| self.key());
        let set = match self.bed.api.ask_with("POST", &path, &body, key.as_deref()) {
            Ok(_) => after,
            Err(trouble) => {
                match trouble {
                    Trouble::Gone => self.has_gone()?,
                    // A process that was stopped or killed has it later, and so it is recorded.
                    Trouble::Refused(code, why) => self.excuse(&NO_TASK, &code, &why)?,
                    trouble => return Err(trouble.to_string()),
                }
                let now = Qos::shown(&self.get(&format!("/vbds/{vbd}"))?);
                if !now.is(&before) && !now.is(&after) {
                    return Err(format!("VBD {vbd} has {now:?}; it had {before:?} and was to have {after:?}"));
                }
                now
            }
        };
        self.vbd(&vbd)?.qos = set;
        Ok(())
    }

    /// What a VBD shows, and what the process of its disk has in force, is what was set.
    pub fn compare_qos(&self, shown: &Value, uuid: &str) -> Result<(), String> {
        let Some(vbd) = self.vbds.get(uuid) else { return Ok(()) };
        let now = Qos::shown(shown);
        if !now.is(&vbd.qos) {
            return Err(format!("VBD {uuid} has {now:?}, should have {:?}", vbd.qos));
        }
        if !vbd.plugged {
            return Ok(());
        }
        let weight = self.ask_disk(uuid, "share")?["weight"].as_u64().unwrap_or(0);
        let in_force = Qos { limits: self.ask_disk(uuid, "limit")?["limits"].clone(), weight };
        if !in_force.is(&vbd.qos) {
            return Err(format!("the process of VBD {uuid} has {in_force:?}, should have {:?}", vbd.qos));
        }
        Ok(())
    }
}
