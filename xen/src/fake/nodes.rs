//! The nodes of the fake store.
//!
//! It knows nothing about clients and watches. Invariant: every node but the root has a parent, and a node's generation
//! changes when its value, its permissions or its list of children does; that is how a transaction detects a conflict.

use std::collections::BTreeMap;

/// The maximum length of an absolute path (XENSTORE_ABS_PATH_MAX).
const PATH_MAX: usize = 3072;

/// A node.
#[derive(Clone)]
struct Node {
    value: Vec<u8>,
    permissions: Vec<String>,
    changed: u64,
}

/// All nodes, by absolute path.
#[derive(Clone)]
pub(super) struct Nodes {
    nodes: BTreeMap<String, Node>,
    changes: u64,
}

/// A modification of the store.
#[derive(Clone)]
pub(super) enum Change {
    Write(String, Vec<u8>),
    Remove(String),
    Permissions(String, Vec<String>),
}

/// What a modification changed: watches of this node and all above it fire, or if `exact` only those of this one.
pub(super) struct Changed {
    pub path: String,
    pub exact: bool,
}

impl Default for Nodes {
    fn default() -> Nodes {
        let root = Node { value: Vec::new(), permissions: vec!["n0".to_owned()], changed: 0 };
        Nodes { nodes: BTreeMap::from([("/".to_owned(), root)]), changes: 0 }
    }
}

impl Nodes {
    pub(super) fn value(&self, path: &str) -> Option<Vec<u8>> {
        self.nodes.get(path).map(|node| node.value.clone())
    }

    pub(super) fn permissions(&self, path: &str) -> Option<Vec<String>> {
        self.nodes.get(path).map(|node| node.permissions.clone())
    }

    pub(super) fn children(&self, path: &str) -> Option<Vec<String>> {
        self.nodes.contains_key(path).then(|| {
            let names = self.below(path).filter_map(|(below, name)| (!name.contains('/')).then_some((below, name)));
            names.map(|(_, name)| name.to_owned()).collect()
        })
    }

    /// The generation of a node; `None` if it does not exist.
    pub(super) fn changed(&self, path: &str) -> Option<u64> {
        self.nodes.get(path).map(|node| node.changed)
    }

    /// The nodes that a change depends on or alters.
    pub(super) fn affected_nodes(&self, change: &Change) -> Vec<String> {
        match change {
            Change::Permissions(path, _) => vec![path.clone()],
            Change::Remove(path) => {
                let below = self.below(path).map(|(below, _)| below.to_owned());
                below.chain([path.clone()]).chain(parent(path).map(str::to_owned)).collect()
            }
            Change::Write(path, _) => {
                let mut affected_nodes = vec![path.clone()];
                let mut at = path.as_str();
                while let (false, Some(above)) = (self.nodes.contains_key(at), parent(at)) {
                    affected_nodes.push(above.to_owned());
                    at = above;
                }
                affected_nodes
            }
        }
    }

    /// Applies a change, or returns the store's error code.
    pub(super) fn change(&mut self, change: &Change) -> Result<Vec<Changed>, &'static str> {
        match change {
            Change::Write(path, value) => Ok(self.write(path, value)),
            Change::Remove(path) => self.remove(path),
            Change::Permissions(path, who) => {
                self.changes += 1;
                let node = self.nodes.get_mut(path).ok_or("ENOENT")?;
                (node.permissions, node.changed) = (who.clone(), self.changes);
                Ok(vec![Changed { path: path.clone(), exact: false }])
            }
        }
    }

    fn write(&mut self, path: &str, value: &[u8]) -> Vec<Changed> {
        self.create(path);
        self.changes += 1;
        if let Some(node) = self.nodes.get_mut(path) {
            (node.value, node.changed) = (value.to_vec(), self.changes);
        }
        vec![Changed { path: path.to_owned(), exact: false }]
    }

    /// Creates a node and its missing parents, with the permissions of the lowest existing one.
    fn create(&mut self, path: &str) -> Vec<String> {
        if let Some(node) = self.nodes.get(path) {
            return node.permissions.clone();
        }
        let Some(above) = parent(path) else { return Vec::new() };
        let permissions = self.create(above);
        self.touch(above);
        let node = Node { value: Vec::new(), permissions: permissions.clone(), changed: self.changes };
        self.nodes.insert(path.to_owned(), node);
        permissions
    }

    fn remove(&mut self, path: &str) -> Result<Vec<Changed>, &'static str> {
        let above = parent(path).ok_or("EINVAL")?;
        if !self.nodes.contains_key(path) {
            return if self.nodes.contains_key(above) { Ok(Vec::new()) } else { Err("ENOENT") };
        }
        let below: Vec<String> = self.below(path).map(|(below, _)| below.to_owned()).collect();
        let mut changed = vec![Changed { path: path.to_owned(), exact: false }];
        self.nodes.remove(path);
        for path in below {
            self.nodes.remove(&path);
            changed.push(Changed { path, exact: true });
        }
        self.touch(above);
        Ok(changed)
    }

    /// Records that the list of a node's children changed.
    fn touch(&mut self, path: &str) {
        self.changes += 1;
        if let Some(node) = self.nodes.get_mut(path) {
            node.changed = self.changes;
        }
    }

    /// All nodes below one, with their relative paths.
    fn below<'n>(&'n self, path: &str) -> impl Iterator<Item = (&'n str, &'n str)> {
        let prefix = if path == "/" { "/".to_owned() } else { format!("{path}/") };
        let from = self.nodes.range(prefix.clone()..);
        from.map_while(move |(path, _)| path.strip_prefix(&prefix).map(|name| (path.as_str(), name)))
            .filter(|(_, name)| !name.is_empty())
    }
}

/// Whether the store accepts such a path (docs/misc/xenstore.txt).
pub(super) fn is_path(path: &str) -> bool {
    let letters = path.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-/_@".contains(&byte));
    let slashes = path == "/" || !(path.ends_with('/') || path.contains("//"));
    !path.is_empty() && path.len() <= PATH_MAX && letters && slashes
}

fn parent(path: &str) -> Option<&str> {
    match path.rsplit_once('/')? {
        (_, "") => None,
        ("", _) => Some("/"),
        (above, _) => Some(above),
    }
}
