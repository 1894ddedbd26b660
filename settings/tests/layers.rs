//! Layers, origins and error texts.

use std::{
    collections::HashMap, ffi::OsString, os::unix::ffi::OsStringExt, path::PathBuf, time::Duration,
};

use gradwire_settings::{
    KEYS, Layers, Origin, RESERVED_VARIABLES, Settings, SettingsError,
    horovod::{Effect, VARIABLES},
    layers,
};

fn env(pairs: &[(&str, &str)]) -> HashMap<String, String> {
    pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
}

fn flags(flags: &[&str]) -> Vec<String> {
    flags.iter().map(|flag| (*flag).to_owned()).collect()
}

fn file(text: &str) -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("gradwire.toml");
    std::fs::write(&path, text).unwrap();
    (dir, path)
}

fn error(layers: Layers) -> String {
    Settings::load(&layers).expect_err("these layers are invalid").to_string()
}

#[test]
fn every_default_is_valid_and_documented_once() {
    let loaded = Settings::load(&Layers::default()).unwrap();
    assert_eq!(loaded.rows.len(), KEYS.len());
    for (row, key) in loaded.rows.iter().zip(KEYS) {
        assert_eq!((row.key.name, &row.origin), (key.name, &Origin::Default));
        assert_eq!(row.value, key.default, "{}: the default is in its shown form", key.name);
        assert!(key.doc.len() > 10, "{} is documented", key.name);
        assert_eq!(KEYS.iter().filter(|other| other.name == key.name).count(), 1, "{}", key.name);
        for unit in ["ms", "us", "bytes"] {
            let ends = key.name.ends_with(&format!("_{unit}"));
            assert_eq!(ends, key.unit == unit, "{}: the name tells the unit", key.name);
        }
    }
    assert!(RESERVED_VARIABLES.iter().all(|name| !name.contains("__")));
    assert_eq!(Settings::default(), loaded.settings);
}

#[test]
fn the_last_layer_wins_and_is_the_origin() {
    let (_dir, path) = file(
        "[negotiation]\npiece_bytes = \"1MiB\"\ncredit_pieces = 3\n[data]\nlanes = 4\n\
         [launch]\nssh_args = [\" -p\", 2222]\n",
    );
    let layers = Layers {
        file: Some(path.clone()),
        environment: env(&[
            ("GRADWIRE_NEGOTIATION__PIECE_BYTES", "2MiB"),
            ("GRADWIRE_DATA__LANES", "5"),
            ("GRADWIRE_RANK", "3"),
            ("PATH", "/bin"),
        ]),
        flags: flags(&["data.lanes=6", "data.lanes=7", "worker.spin_us=50"]),
    };
    let loaded = Settings::load(&layers).unwrap();
    let settings = &loaded.settings;
    assert_eq!(settings.negotiation.credit_pieces, 3);
    assert_eq!(settings.negotiation.piece_bytes, 2 << 20);
    assert_eq!(settings.data.lanes, 7);
    assert_eq!(settings.worker.spin, Some(Duration::from_micros(50)));
    assert_eq!(settings.launch.ssh_args, ["-p", "2222"]);

    let shown = |name: &str| {
        let row = loaded.rows.iter().find(|row| row.key.name == name).unwrap();
        format!("{} ({})", row.value, row.origin)
    };
    let from_file = format!("3 (file {})", path.display());
    assert_eq!(shown("negotiation.credit_pieces"), from_file);
    assert_eq!(
        shown("negotiation.piece_bytes"),
        "2MiB (environment GRADWIRE_NEGOTIATION__PIECE_BYTES)"
    );
    assert_eq!(shown("data.lanes"), "7 (command line)");
    assert_eq!(shown("data.chunk_bytes"), "256KiB (default)");
}

#[test]
fn the_environment_passes_all_settings_on() {
    let layers = Layers {
        flags: flags(&["data.lanes=6", "launch.ssh_args=-p 22", "worker.spin_us=auto"]),
        ..Layers::default()
    };
    let loaded = Settings::load(&layers).unwrap();
    let variables: HashMap<_, _> = loaded.variables().collect();
    assert_eq!(variables.len(), 3, "{variables:?}");
    let there = Settings::load(&Layers { environment: variables, ..Layers::default() }).unwrap();
    assert_eq!(there.settings, loaded.settings);
}

#[test]
fn unknown_keys_are_named_with_a_suggestion() {
    let (_dir, path) = file("[data]\nlane = 4\n");
    assert_eq!(
        error(Layers { file: Some(path.clone()), ..Layers::default() }),
        format!(
            "unknown setting 'data.lane' (file {}); did you mean 'data.lanes'?; \
             `gradwire config show --all` lists them",
            path.display()
        )
    );
    let cases = [
        ("GRADWIRE_DATA__LANE", "'data.lane'", "did you mean GRADWIRE_DATA__LANES?"),
        ("GRADWIRE_DATA_LANES", "'data.lanes'", "did you mean GRADWIRE_DATA__LANES?"),
        ("GRADWIRE__DATA_LANES", "'_data_lanes'", "did you mean GRADWIRE_DATA__LANES?"),
        (
            "GRADWIRE_DATA__PIECE_BYTES",
            "'data.piece_bytes'",
            "did you mean GRADWIRE_NEGOTIATION__PIECE_BYTES?",
        ),
    ];
    for (name, key, neighbour) in cases {
        let text = error(Layers { environment: env(&[(name, "1")]), ..Layers::default() });
        assert!(text.contains(key) && text.contains(&format!("(environment {name})")), "{text}");
        assert!(text.contains(neighbour), "{text}");
    }
    let text = error(Layers { flags: flags(&["zzz=1"]), ..Layers::default() });
    assert!(text.starts_with("unknown setting 'zzz' (command line); `gradwire"), "{text}");
}

#[test]
fn invalid_values_are_shown_with_their_origin() {
    let (_dir, path) = file("[data]\nlanes = true\n");
    assert_eq!(
        error(Layers { file: Some(path.clone()), ..Layers::default() }),
        format!(
            "setting data.lanes = \"true\" (file {}): expected a whole number from 1 to 16",
            path.display()
        )
    );
    let cases = [
        ("data.lanes=0", "a whole number from 1 to 16"),
        ("data.lanes=two", "a whole number from 1 to 16"),
        ("negotiation.piece_bytes=1GiB", "a number of bytes from 64KiB to 64MiB"),
        ("worker.spin_us=-1", "'auto' or a whole number from 0"),
        ("metrics.listen=", "an address with a port or a port range, ip:port or"),
        ("metrics.listen=localhost:1", "an address with a port or a port range, ip:port or"),
        ("coordinator.listen=1.2.3.4", "an address ip:port, such as 10.0.0.1:7000, or empty"),
        ("log.format=xml", "one of text, json"),
        ("log.level=a\nb", "text without control characters"),
        ("node.rack=a\nb", "1 to 8 names with '/' between them, from the outermost group"),
        ("node.rack=pod1//r3", "1 to 8 names with '/' between them, from the outermost group"),
    ];
    for (flag, expected) in cases {
        let text = error(Layers { flags: flags(&[flag]), ..Layers::default() });
        let key = flag.split('=').next().unwrap();
        assert!(text.starts_with(&format!("setting {key} = ")), "{text}");
        assert!(text.contains(&format!("(command line): expected {expected}")), "{text}");
    }
    for (rules, expected) in [
        ("rng", "unknown algorithm \"rng\"; use one of ring, recursive-doubling"),
        ("ring; 9-=chain", "rule 2, character 7: its range overlaps that of rule 1"),
    ] {
        let text = error(Layers {
            flags: flags(&[&format!("negotiation.algorithm={rules}")]),
            ..Layers::default()
        });
        let place = format!("setting negotiation.algorithm = {rules:?} (command line): ");
        assert!(text.starts_with(&place) && text.contains(expected), "{text}");
    }
    let text = error(Layers { flags: flags(&["data.lanes"]), ..Layers::default() });
    assert_eq!(text, "invalid --set \"data.lanes\": expected section.key=value");
}

#[test]
fn a_setting_that_is_not_text_is_refused() {
    let odd = |name: &str| (OsString::from(name), OsString::from_vec(b"2\xff".to_vec()));
    for (name, expected) in [
        ("GRADWIRE_DATA__LANES", "environment GRADWIRE_DATA__LANES"),
        ("GRADWIRE_DATA_LANES", "unknown setting 'data.lanes' (environment GRADWIRE_DATA_LANES)"),
        ("HOROVOD_FUSION_THRESHOLD", "environment HOROVOD_FUSION_THRESHOLD"),
    ] {
        let environment = layers::text([odd(name)]);
        let message = error(Layers { environment, ..Layers::default() });
        assert!(message.contains(expected), "{message}");
    }
    // Others may be anything, and some are paths.
    assert!(
        layers::text([odd("NAME"), odd("GRADWIRE_CONFIG"), odd("HOROVOD_TIMELINE")]).is_empty()
    );
}

#[test]
fn algorithm_names_ignore_case() {
    for (given, meant) in [
        ("Double_Tree", "double-tree"),
        ("Circulant(radix=4)", "circulant(radix=4)"),
        ("auto", "auto"),
        ("0-64KiB=Linear; 64K-=^ring,^linear", "0-64K=linear; 64K-=^ring,^linear"),
        ("0-64K=linear;\n64K-=ring", "0-64K=linear; 64K-=ring"),
    ] {
        let flags = flags(&[&format!("negotiation.algorithm={given}")]);
        let loaded = Settings::load(&Layers { flags, ..Layers::default() }).unwrap();
        assert_eq!(loaded.settings.negotiation.algorithm.to_string(), meant);
    }
}

#[test]
fn missing_and_invalid_files_are_named() {
    let missing = PathBuf::from("/nonexistent/gradwire.toml");
    let text = error(Layers { file: Some(missing), ..Layers::default() });
    assert!(text.starts_with("settings file /nonexistent/gradwire.toml: No such file"), "{text}");
    let (_dir, path) = file("[data]\nlanes = = 4\n");
    let text = error(Layers { file: Some(path), ..Layers::default() });
    assert!(
        text.contains("gradwire.toml is not valid TOML: ") && text.contains("line 2"),
        "{text}"
    );
    let (_dir, path) = file("data = 3\n");
    let text = error(Layers { file: Some(path), ..Layers::default() });
    assert!(text.starts_with("unknown setting 'data' (file "), "{text}");
}

#[test]
fn contradictory_values_are_refused() {
    let cases: [(&[&str], &str); 8] = [
        (
            &["negotiation.strict=true", "negotiation.algorithm=allreduce=ring"],
            "negotiation.algorithm = \"allreduce=ring\": negotiation.strict allows only \
             recursive-doubling, halving-doubling, rabenseifner for reductions, and rule 1 allows \
             none of them",
        ),
        (
            &["negotiation.algorithm=ring", "data.compression=int8"],
            "data.compression = int8 needs the direct or hierarchical algorithm for allreduces",
        ),
        (
            &["negotiation.strict=true", "data.compression=bf16"],
            "negotiation.strict = true and data.compression = bf16 can't be combined",
        ),
        (&["otlp.sample_steps=9"], "otlp.sample_steps = 9 requires otlp.endpoint"),
        (&["heartbeat.timeout_ms=1000"], "heartbeat.timeout_ms = 1000 must be more than twice"),
        (&["job.timeout_ms=3000"], "job.timeout_ms = 3000 must be more than heartbeat.timeout_ms"),
        (&["negotiation.piece_bytes=64KiB"], "data.chunk_bytes = 262144 must not be more than"),
        (&["worker.arena_max_bytes=1MiB"], "worker.arena_max_bytes = 1048576 must be 0"),
    ];
    for (given, expected) in cases {
        let layers = Layers { flags: flags(given), ..Layers::default() };
        let error = Settings::load(&layers).unwrap_err();
        assert!(matches!(error, SettingsError::Rule(_)));
        assert!(error.to_string().starts_with(expected), "{error}");
    }
}

#[test]
fn horovods_variables_have_the_lowest_priority() {
    let given = [
        ("HOROVOD_FUSION_THRESHOLD", "33554432"),
        ("HOROVOD_CACHE_CAPACITY", "2048"),
        ("HOROVOD_STALL_CHECK_TIME_SECONDS", "90"),
        ("HOROVOD_LOG_LEVEL", "WARNING"),
        ("HOROVOD_GLOO_TIMEOUT_SECONDS", "120"),
        ("HOROVOD_START_TIMEOUT", "600"),
        ("HOROVOD_CYCLE_TIME", "nonsense"),
        ("HOROVOD_TIMELINE", "/tmp/timeline.json"),
        ("HOROVOD_TIMELINE_MARK_CYCLES", "1"),
        ("HOROVOD_AUTOTUNE", ""),
        ("HOROVOD_HIERARCHICAL_ALLREDUCE", "1"),
        ("HOROVOD_RANK", "1"),
    ];
    let loaded = Settings::load(&Layers { environment: env(&given), ..Layers::default() }).unwrap();
    let settings = &loaded.settings;
    assert_eq!(settings.negotiation.piece_bytes, 32 << 20);
    assert_eq!(settings.negotiation.max_tensors, 2048);
    assert_eq!(settings.negotiation.stall_warning, Duration::from_secs(90));
    assert_eq!(settings.log.level, "warn");
    assert_eq!(settings.job.timeout, Duration::from_secs(120));
    assert_eq!(settings.start.timeout, Duration::from_secs(600));
    assert_eq!(loaded.without_effect, ["HOROVOD_CYCLE_TIME", "HOROVOD_TIMELINE_MARK_CYCLES"]);
    let row = loaded.rows.iter().find(|row| row.key.name == "log.level").unwrap();
    assert_eq!(row.origin.to_string(), "environment HOROVOD_LOG_LEVEL");
    // Other processes get them under Gradwire's names.
    assert!(loaded.variables().any(|(name, _)| name == "GRADWIRE_NEGOTIATION__PIECE_BYTES"));

    let (_dir, path) = file("[negotiation]\npiece_bytes = \"1MiB\"\n[log]\nlevel = \"info\"\n");
    let mut environment = env(&given);
    environment.insert("GRADWIRE_LOG__LEVEL".into(), "debug".into());
    let flags = flags(&["negotiation.max_tensors=7"]);
    let settings =
        Settings::load(&Layers { file: Some(path), environment, flags }).unwrap().settings;
    assert_eq!(settings.negotiation.piece_bytes, 1 << 20);
    assert_eq!(settings.log.level, "debug");
    assert_eq!(settings.negotiation.max_tensors, 7);
}

#[test]
fn horovods_values_are_clamped_to_the_range() {
    let piece = |text| {
        let environment = env(&[("HOROVOD_FUSION_THRESHOLD", text)]);
        let layers = Layers { environment, ..Layers::default() };
        Settings::load(&layers).unwrap().settings.negotiation.piece_bytes
    };
    // 128 MiB is Horovod's default; 0 disables fusion there.
    assert_eq!(
        (piece("134217728"), piece("0"), piece(" 1048576 ")),
        (64 << 20, 256 << 10, 1 << 20)
    );
    let stall = |given: &[(&str, &str)]| {
        let layers = Layers { environment: env(given), ..Layers::default() };
        Settings::load(&layers).unwrap().settings.negotiation.stall_warning
    };
    let seconds = ("HOROVOD_STALL_CHECK_TIME_SECONDS", "30");
    assert_eq!(stall(&[seconds, ("HOROVOD_STALL_CHECK_DISABLE", "0")]).as_secs(), 30);
    assert_eq!(stall(&[seconds, ("HOROVOD_STALL_CHECK_DISABLE", "1")]).as_secs(), 86_400);
    assert_eq!(stall(&[("HOROVOD_STALL_CHECK_TIME_SECONDS", "0")]).as_millis(), 100);
    for level in ["trace", "DEBUG", "info", "warning", "Error", "fatal"] {
        let environment = env(&[("HOROVOD_LOG_LEVEL", level)]);
        Settings::load(&Layers { environment, ..Layers::default() }).unwrap();
    }
}

#[test]
fn invalid_horovod_values_are_named() {
    let cases = [
        ("HOROVOD_FUSION_THRESHOLD", "64MB", "expected a whole number, as in Horovod"),
        ("HOROVOD_CACHE_CAPACITY", "(None,)", "expected a whole number, as in Horovod"),
        ("HOROVOD_STALL_CHECK_TIME_SECONDS", "1.5", "expected a whole number of seconds"),
        ("HOROVOD_STALL_CHECK_DISABLE", "yes", "expected a whole number: 1 or 0"),
        ("HOROVOD_LOG_LEVEL", "loud", "expected one of trace, debug, info, warning, error, fatal"),
    ];
    for (name, value, expected) in cases {
        let text = error(Layers { environment: env(&[(name, value)]), ..Layers::default() });
        assert!(text.contains(&format!("{value:?} (environment {name}): {expected}")), "{text}");
    }
}

#[test]
fn byteps_variables_set_what_horovods_do_not() {
    let of = |given: &[(&str, &str)]| {
        let layers = Layers { environment: env(given), ..Layers::default() };
        Settings::load(&layers).unwrap().settings
    };
    let byteps = ("BYTEPS_PARTITION_BYTES", "4096000");
    let settings = of(&[byteps, ("BYTEPS_LOG_LEVEL", "WARNING")]);
    assert_eq!((settings.negotiation.piece_bytes, &*settings.log.level), (4_096_000, "warn"));
    let both = of(&[byteps, ("HOROVOD_FUSION_THRESHOLD", "1048576")]);
    assert_eq!(both.negotiation.piece_bytes, 1 << 20);
}

/// The tables in the documentation list every variable, with the setting that it sets.
#[test]
fn every_variable_of_others_is_documented() {
    for (name, effect) in VARIABLES {
        let (name, docs) = match name.strip_prefix("HOROVOD_") {
            Some(name) => (name, include_str!("../../docs/horovod.md")),
            None => (*name, include_str!("../../docs/byteps.md")),
        };
        let row = docs.lines().find(|line| {
            line.starts_with('|')
                && line.split('|').nth(1).is_some_and(|first| {
                    first.split(',').any(|one| one.trim().trim_matches('`') == name)
                })
        });
        let row = row.unwrap_or_else(|| panic!("{name} is not in docs/horovod.md"));
        if let Effect::Sets { key, .. } = effect {
            assert!(KEYS.iter().any(|known| known.name == *key), "{key}");
            assert!(row.contains(&format!("`{key}`")), "{row}");
        }
    }
}
