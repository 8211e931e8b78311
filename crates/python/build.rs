//! On Linux, wrap the Python functions that `exit.c` lists.

/// The functions that `exit.c` wraps.
const WRAPPED: &[&str] = &[
    "PyErr_CheckSignals", "PyEval_RestoreThread", "PyGILState_Ensure", "PyImport_Import", "PyIter_Next",
    "PyNumber_Index", "PyOS_FSPath", "PyObject_Call", "PyObject_CallMethodObjArgs", "PyObject_CallNoArgs",
    "PyObject_GetAttr", "PyObject_GetItem", "PyObject_GetIter", "PyObject_Repr", "PyObject_Str",
];

fn main() {
    println!("cargo:rerun-if-changed=src/exit.c");
    if std::env::var("CARGO_CFG_TARGET_OS").as_deref() == Ok("linux") {
        cc::Build::new().file("src/exit.c").compile("penstock_exit");
        WRAPPED.iter().for_each(|name| println!("cargo:rustc-cdylib-link-arg=-Wl,--wrap={name}"));
    }
}
