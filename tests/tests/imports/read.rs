//! Reads from the sources which file of a crate imports which other file.
//!
//! A path counts as an import wherever it is: in a `use`, in code, in the arguments of a macro. It
//! leads to the file that *defines* the item, so re-exports are resolved. Code that is compiled
//! only for tests is ignored, and so are `mod` lines, which import nothing.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fs,
    path::{Path, PathBuf},
};

use petgraph::{algo::tarjan_scc, graph::DiGraph};
use proc_macro2::{TokenStream, TokenTree};
use quote::ToTokens;
use syn::{Attribute, Item, UseTree};

/// For each folder, its parts, and for each part the parts that it imports from.
pub(crate) type Folders = BTreeMap<PathBuf, BTreeMap<String, BTreeSet<String>>>;

/// A position in the list of modules.
type Id = usize;

/// The imports of one crate, by the path of each file below the crate's source folder: the imported
/// files, each with the line of the first import.
pub(crate) type Imports = BTreeMap<PathBuf, BTreeMap<PathBuf, usize>>;

#[derive(Default)]
struct Module {
    file: PathBuf,
    parent: Option<Id>,
    children: HashMap<String, Id>,
    /// The names imported by `use`, with their paths.
    uses: HashMap<String, Vec<String>>,
    /// The modules imported by glob.
    globs: Vec<Vec<String>>,
    /// The names that are defined here.
    items: BTreeSet<String>,
    /// The paths in the module, with their lines.
    paths: Vec<(Vec<String>, usize)>,
}

/// Reads the crate whose root is `root`, a `lib.rs` or `main.rs`.
///
/// # Panics
/// If a file can't be read or isn't Rust.
pub(crate) fn read(root: &Path) -> Imports {
    let folder = root.parent().expect("a file in a folder");
    let mut krate = Crate { folder: folder.to_owned(), modules: Vec::new() };
    let name = root.file_name().expect("a file").into();
    krate.load(name, folder.to_owned(), None);
    krate.imports()
}

struct Crate {
    folder: PathBuf,
    modules: Vec<Module>,
}

impl Crate {
    /// Reads the module in `file`, whose children are in `below`.
    fn load(&mut self, file: PathBuf, below: PathBuf, parent: Option<Id>) -> Id {
        let path = self.folder.join(&file);
        let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path:?}: {error}"));
        let syntax = syn::parse_file(&text).unwrap_or_else(|error| panic!("{path:?}: {error}"));
        let id = self.modules.len();
        self.modules.push(Module { file, parent, ..Module::default() });
        self.items(id, &syntax.items, &below);
        id
    }

    fn items(&mut self, id: Id, items: &[Item], below: &Path) {
        for item in items {
            if only_for_tests(attributes(item)) {
                continue;
            }
            match item {
                Item::Mod(module) => {
                    let name = module.ident.to_string();
                    let inside = below.join(&name);
                    let child = if let Some((_, items)) = &module.content {
                        let child = self.modules.len();
                        let file = self.modules[id].file.clone();
                        self.modules.push(Module { file, parent: Some(id), ..Module::default() });
                        self.items(child, items, &inside);
                        child
                    } else {
                        let flat = below.join(format!("{name}.rs"));
                        let file = if flat.exists() { flat } else { inside.join("mod.rs") };
                        let file = file.strip_prefix(&self.folder).expect("below it").to_owned();
                        self.load(file, inside, Some(id))
                    };
                    self.modules[id].children.insert(name, child);
                }
                Item::Use(import) => {
                    let line = import.use_token.span.start().line;
                    self.uses(id, &import.tree, &mut Vec::new(), line);
                }
                other => {
                    if let Some(name) = defined(other) {
                        self.modules[id].items.insert(name);
                    }
                    let paths = &mut self.modules[id].paths;
                    collect(other.to_token_stream(), paths);
                }
            }
        }
    }

    fn uses(&mut self, id: Id, tree: &UseTree, prefix: &mut Vec<String>, line: usize) {
        let module = &mut self.modules[id];
        match tree {
            UseTree::Path(path) => {
                prefix.push(path.ident.to_string());
                self.uses(id, &path.tree, prefix, line);
                prefix.pop();
            }
            UseTree::Name(name) => {
                let name = name.ident.to_string();
                let mut path = prefix.clone();
                let known = if name == "self" {
                    path.last().cloned().unwrap_or_default()
                } else {
                    path.push(name.clone());
                    name
                };
                module.uses.insert(known, path.clone());
                module.paths.push((path, line));
            }
            UseTree::Rename(rename) => {
                let mut path = prefix.clone();
                if rename.ident != "self" {
                    path.push(rename.ident.to_string());
                }
                module.uses.insert(rename.rename.to_string(), path.clone());
                module.paths.push((path, line));
            }
            UseTree::Glob(_) => {
                module.globs.push(prefix.clone());
                module.paths.push((prefix.clone(), line));
            }
            UseTree::Group(group) => {
                for tree in &group.items {
                    self.uses(id, tree, prefix, line);
                }
            }
        }
    }

    fn imports(&self) -> Imports {
        let mut imports = Imports::new();
        for (id, module) in self.modules.iter().enumerate() {
            let entry = imports.entry(module.file.clone()).or_default();
            for (path, line) in &module.paths {
                if let Some(target) = self.resolve(id, path, 0) {
                    let file = &self.modules[target].file;
                    if *file != module.file {
                        entry.entry(file.clone()).or_insert(*line);
                    }
                }
            }
        }
        imports
    }

    /// The module that defines the item that `path` names in module `at`; `None` if it is in
    /// another crate.
    fn resolve(&self, at: Id, path: &[String], depth: usize) -> Option<Id> {
        // Cyclic paths name nothing.
        if depth > 16 {
            return None;
        }
        let mut module = at;
        let mut rest = path;
        match path.first()?.as_str() {
            "crate" => {
                while let Some(parent) = self.modules[module].parent {
                    module = parent;
                }
                rest = &rest[1..];
            }
            "self" => rest = &rest[1..],
            "super" => {
                while rest.first().is_some_and(|name| name == "super") {
                    module = self.modules[module].parent?;
                    rest = &rest[1..];
                }
            }
            // A single name was imported by a `use`, which is counted there.
            name if !self.modules[at].children.contains_key(name) => return None,
            _ => {}
        }
        while let Some((name, further)) = rest.split_first() {
            let here = &self.modules[module];
            if let Some(child) = here.children.get(name) {
                module = *child;
                rest = further;
            } else if here.items.contains(name) {
                return Some(module);
            } else if let Some(behind) = here.uses.get(name) {
                let whole: Vec<String> = behind.iter().chain(further).cloned().collect();
                return self.resolve(module, &whole, depth + 1);
            } else {
                let behind = here.globs.iter().find_map(|glob| {
                    let source = self.resolve(module, glob, depth + 1)?;
                    self.modules[source].items.contains(name).then_some(source)
                });
                return Some(behind.unwrap_or(module));
            }
        }
        Some(module)
    }
}

/// Adds the multi-part paths in `tokens`, with their lines.
fn collect(tokens: TokenStream, paths: &mut Vec<(Vec<String>, usize)>) {
    let mut path: Vec<String> = Vec::new();
    let mut line = 0;
    let mut colons = 0;
    let end = |path: &mut Vec<String>, line, paths: &mut Vec<_>| {
        if path.len() > 1 {
            paths.push((std::mem::take(path), line));
        }
        path.clear();
    };
    for token in tokens {
        match token {
            TokenTree::Ident(name) => {
                if colons != 2 {
                    end(&mut path, line, paths);
                    line = name.span().start().line;
                }
                path.push(name.to_string());
                colons = 0;
            }
            TokenTree::Punct(mark) if mark.as_char() == ':' => colons += 1,
            other => {
                // `pub(in …)` only limits visibility, and imports nothing.
                let visibility = path.last().is_some_and(|last| last == "pub");
                end(&mut path, line, paths);
                colons = 0;
                match other {
                    TokenTree::Group(group) if !visibility => collect(group.stream(), paths),
                    _ => {}
                }
            }
        }
    }
    end(&mut path, line, paths);
}

/// Whether an item is compiled only for tests.
fn only_for_tests(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let text = attribute.to_token_stream().to_string();
        attribute.path().is_ident("cfg") && text.contains("test") && !text.contains("not")
    })
}

fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Macro(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

/// The name that an item defines in its module.
fn defined(item: &Item) -> Option<String> {
    Some(match item {
        Item::Const(item) => item.ident.to_string(),
        Item::Enum(item) => item.ident.to_string(),
        Item::Fn(item) => item.sig.ident.to_string(),
        Item::Macro(item) => item.ident.as_ref()?.to_string(),
        Item::Static(item) => item.ident.to_string(),
        Item::Struct(item) => item.ident.to_string(),
        Item::Trait(item) => item.ident.to_string(),
        Item::Type(item) => item.ident.to_string(),
        Item::Union(item) => item.ident.to_string(),
        _ => return None,
    })
}

/// The groups of parts that import each other, directly or in a cycle.
pub(crate) fn circles<T: Ord + Clone>(edges: &BTreeMap<T, BTreeSet<T>>) -> Vec<Vec<T>> {
    let mut graph = DiGraph::new();
    let nodes: BTreeMap<&T, _> = edges.keys().map(|part| (part, graph.add_node(part))).collect();
    for (from, targets) in edges {
        for target in targets {
            if let Some(to) = nodes.get(target) {
                graph.add_edge(nodes[from], *to, ());
            }
        }
    }
    let groups = tarjan_scc(&graph).into_iter().filter(|group| group.len() > 1);
    groups.map(|group| group.into_iter().map(|node| graph[node].clone()).collect()).collect()
}

/// For each folder of the crate, the imports between its folders and files. A folder includes
/// everything in it, and the file with its name.
pub(crate) fn by_folder(imports: &Imports) -> Folders {
    let mut folders = Folders::new();
    for (from, targets) in imports {
        for to in targets.keys() {
            let (from, to) = (parts(from), parts(to));
            let common = from.iter().zip(&to).take_while(|(one, other)| one == other).count();
            let part = |path: &[String]| path.get(common).cloned().unwrap_or_default();
            let (one, other) = (part(&from), part(&to));
            let folder = from[..common].iter().collect();
            let edges = folders.entry(folder).or_default();
            edges.entry(other.clone()).or_default();
            edges.entry(one).or_default().insert(other);
        }
    }
    folders
}

/// The names of the modules that lead to a file; none for the crate's root.
fn parts(file: &Path) -> Vec<String> {
    let stem = file.with_extension("");
    let mut parts: Vec<String> =
        stem.iter().map(|part| part.to_string_lossy().into_owned()).collect();
    if parts.last().is_some_and(|last| last == "mod") {
        parts.pop();
    }
    if parts == ["lib"] || parts == ["main"] {
        parts.clear();
    }
    parts
}
