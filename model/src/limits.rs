//! Checks limits and weights of disks: the API and the process of the disk have what was set, whichever of the two was
//! killed meanwhile.

use serde_json::{Value, json};
use testbed::daemon::api::Trouble;

use super::verbs::NO_TASK;
use super::world::World;

/// Limits and weight of a disk.
#[derive(Clone, Debug, PartialEq)]
pub struct Qos {
    /// Its limits by name; an empty object for none.
    pub limits: Value,
    pub weight: u64,
}

impl Default for Qos {
    fn default() -> Qos {
        Qos { limits: json!({}), weight: 100 }
    }
}

impl Qos {
    /// Limits and weight in a VBD of the API.
    pub fn parse(vbd: &Value) -> Qos {
        let limits = if vbd["limits"].is_object() { vbd["limits"].clone() } else { json!({}) };
        Qos { limits, weight: vbd["share_weight"].as_u64().unwrap_or(0) }
    }

    /// Whether both are equal; a burst of 100 milliseconds is the default.
    fn equals(&self, other: &Qos) -> bool {
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
            // So high that nothing waits long for them.
            let limits = match self.random.below(4) {
                0 => json!({}),
                1 => json!({ "iops": 20_000 + self.random.below(1000) }),
                2 => json!({ "bandwidth": (1 << 30) + self.random.below(1000), "burst_ms": 500 }),
                _ => json!({ "write_iops": 20_000 + self.random.below(1000), "read_bandwidth": 1 << 30 }),
            };
            ("limit", limits.clone(), Qos { limits, ..before.clone() })
        };
        self.ensure_daemon()?;
        let path = format!("/vbds/{vbd}/{verb}");
        self.log(format!("POST {path} {body}"));
        self.count("limit");
        let key = self.random_is(3).then(|| self.key());
        let set = match self.bed.api.ask_with("POST", &path, &body, key.as_deref()) {
            Ok(_) => after,
            Err(trouble) => {
                match trouble {
                    Trouble::Gone => self.note_daemon_gone()?,
                    // The setting is recorded; a process that was stopped or killed receives it later.
                    Trouble::Refused(code, why) => self.excuse(&NO_TASK, &code, &why)?,
                    trouble => return Err(trouble.to_string()),
                }
                let now = Qos::parse(&self.get(&format!("/vbds/{vbd}"))?);
                if !now.equals(&before) && !now.equals(&after) {
                    return Err(format!("VBD {vbd} has {now:?}; it had {before:?} and was to have {after:?}"));
                }
                now
            }
        };
        self.vbd(&vbd)?.qos = set;
        Ok(())
    }

    /// Compares the limits and weight of a VBD, and those in force in its process, with what was set.
    pub fn compare_qos(&self, parse: &Value, uuid: &str) -> Result<(), String> {
        let Some(vbd) = self.vbds.get(uuid) else { return Ok(()) };
        let now = Qos::parse(parse);
        if !now.equals(&vbd.qos) {
            return Err(format!("VBD {uuid} has {now:?}, should have {:?}", vbd.qos));
        }
        if !vbd.plugged {
            return Ok(());
        }
        let weight = self.ask_disk(uuid, "share")?["weight"].as_u64().unwrap_or(0);
        let in_force = Qos { limits: self.ask_disk(uuid, "limit")?["limits"].clone(), weight };
        if !in_force.equals(&vbd.qos) {
            return Err(format!("the process of VBD {uuid} has {in_force:?}, should have {:?}", vbd.qos));
        }
        Ok(())
    }
}
