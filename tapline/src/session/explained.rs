//! Makes problems readable for users: objects by the names that the user has given, block devices by machine and disk,
//! and the versions of this program and of the daemon if they may be the cause.

use api::{ObjectKind, Problem};
use arguments::mistyped;
use uuid::Uuid;

use super::Session;

impl Session {
    /// Runs `work`; a problem is explained with [`Session::explained`].
    pub async fn explaining<T>(&self, work: impl Future<Output = Result<T, Problem>>) -> Result<T, Problem> {
        match work.await {
            Ok(done) => Ok(done),
            Err(problem) => Err(self.explained(problem).await),
        }
    }

    /// Replaces UUIDs in a problem by the names that the user has given, and block devices by their machine and disk.
    /// With `--json` it is left unchanged.
    async fn explained(&self, problem: Problem) -> Problem {
        if self.json {
            return problem;
        }
        let problem = self.with_versions(self.with_names(problem)).await;
        let problem = self.with_similar_names(problem).await;
        match unnamed_vbd(&problem.detail) {
            Some(uuid) => self.with_vbd_named(problem, uuid).await,
            None => problem,
        }
    }

    /// Adds both versions to a problem that a daemon of another version may cause.
    async fn with_versions(&self, problem: Problem) -> Problem {
        let unreadable = ["cannot read the response", "unknown field", "there is no path"];
        if !unreadable.iter().any(|text| problem.detail.contains(text)) {
            return problem;
        }
        let Ok(daemon) = self.client.daemon_version().await else { return problem };
        let own = env!("CARGO_PKG_VERSION");
        if daemon == own {
            return problem;
        }
        let advice = format!(
            "tapline is version {own}, and taplined is version {daemon}: install the same version of both, then \
             restart taplined (systemctl restart taplined; disks keep running)"
        );
        Problem { advice: Some(advice), ..problem }
    }

    fn with_names(&self, problem: Problem) -> Problem {
        let called = self.named_objects.borrow();
        let explain = |text: String| {
            let pairs = called.iter().flat_map(|called| called.nouns.iter().map(move |noun| (called, noun)));
            pairs.fold(text, |text, (called, noun)| text.replace(&format!("{noun} {}", called.uuid), &called.shown))
        };
        Problem { detail: explain(problem.detail), advice: problem.advice.map(explain), ..problem }
    }

    /// Adds similar names, or the kind that has the name, to a problem about an unknown name.
    async fn with_similar_names(&self, problem: Problem) -> Problem {
        let Some((noun, name)) = unknown_name(&problem.detail) else { return problem };
        let kinds = [("sr", ObjectKind::Sr), ("vdi", ObjectKind::Vdi), ("vm", ObjectKind::Vm)];
        let (mut elsewhere, mut similar) = (Vec::new(), Vec::new());
        for (kind, object) in kinds {
            let Ok(names) = self.names(&[object]).await else { return problem };
            let mut names: Vec<String> = names.into_values().collect();
            names.sort_unstable();
            names.dedup();
            elsewhere.extend(names.iter().filter(|known| **known == name).map(|_| format!("'{name}' is a {kind}")));
            if kind == noun {
                let near = names.into_iter().filter(|known| mistyped::is_slip(&name, known));
                similar.extend(near.take(SIMILAR_MAX).map(|known| format!("there is '{known}'")));
            }
        }
        similar.extend(elsewhere);
        if similar.is_empty() {
            return problem;
        }
        let advice = problem.advice.map(|advice| format!("; {advice}")).unwrap_or_default();
        Problem { advice: Some(format!("{}{advice}", similar.join(", "))), ..problem }
    }

    /// Describes a block device by its machine and disk, if they can be found.
    async fn with_vbd_named(&self, problem: Problem, uuid: Uuid) -> Problem {
        let Ok(vbd) = self.client.vbd(uuid).await else { return problem };
        let Ok(vdi) = self.client.vdi(vbd.vdi).await else { return problem };
        let of = match vbd.vm {
            Some(vm) => match self.client.vm(vm).await {
                Ok(vm) => format!("of VM '{}'", vm.name),
                Err(_) => return problem,
            },
            None => "of a machine managed elsewhere".to_owned(),
        };
        let shown = format!("block device {uuid} (disk '{}' {of})", vdi.name);
        let detail = problem.detail.replace(&format!("VBD {uuid}"), &shown);
        let advice = problem.advice.map(|advice| match advice.as_str() {
            "unplug it first" | "unplug that VBD first" | "unplug its VBDs first" => {
                format!("unplug it first: tapline vbd unplug {uuid}")
            }
            _ => advice,
        });
        Problem { detail, advice, ..problem }
    }
}

/// Maximum number of similar names that are listed.
const SIMILAR_MAX: usize = 3;

/// The kind and the name in a message about an unknown name.
fn unknown_name(text: &str) -> Option<(String, String)> {
    let (noun, name) = text.strip_prefix("no ")?.split_once(" named '")?;
    Some((noun.to_owned(), name.strip_suffix('\'')?.to_owned()))
}

/// The UUID of a block device in a message that does not name it otherwise.
fn unnamed_vbd(text: &str) -> Option<Uuid> {
    let (_, behind) = text.split_once("VBD ")?;
    behind.get(..36)?.parse().ok()
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn an_unknown_name_is_found_in_its_problem() {
        assert_eq!(unknown_name("no vdi named 'wbe'"), Some(("vdi".to_owned(), "wbe".to_owned())));
        assert_eq!(unknown_name("no task has a UUID that begins with 'wbe'"), None);
    }

    #[test]
    fn only_a_block_device_with_a_uuid_is_looked_up() {
        let uuid = Uuid::from_u128(7);
        assert_eq!(unnamed_vbd(&format!("VDI 1 cannot be destroyed while VBD {uuid} is plugged")), Some(uuid));
        assert_eq!(unnamed_vbd("VBD \"data\" is plugged"), None);
        assert_eq!(unnamed_vbd("no VBD 1"), None);
    }
}
