// Before Python 3.14, a daemon thread that takes the GIL while the interpreter is finalized is ended by `pthread_exit`, which unwinds its
// stack. Rust aborts when it meets such an unwinding. Here, the thread sleeps until the process ends, as it would in Python 3.14: the
// linker replaces each function below, through which a thread takes the GIL or runs Python code, with a wrapper. The wrapper's clean-up
// handler stops the unwinding before it reaches Rust. The handlers run only in `pthread_exit`, and cost a few nanoseconds.

#include <pthread.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <unistd.h>

typedef void *object;

static void sleep_forever(void *unused) {
    (void)unused;
    for (;;) {
        pause();
    }
}

#define WRAP(type, name, parameters, arguments)                                                                                         \
    type __real_##name parameters;                                                                                                      \
    type __wrap_##name parameters {                                                                                                     \
        type result;                                                                                                                    \
        pthread_cleanup_push(sleep_forever, NULL);                                                                                      \
        result = __real_##name arguments;                                                                                               \
        pthread_cleanup_pop(0);                                                                                                         \
        return result;                                                                                                                  \
    }

void __real_PyEval_RestoreThread(void *state);
void __wrap_PyEval_RestoreThread(void *state) {
    pthread_cleanup_push(sleep_forever, NULL);
    __real_PyEval_RestoreThread(state);
    pthread_cleanup_pop(0);
}

WRAP(int, PyGILState_Ensure, (void), ())
WRAP(int, PyErr_CheckSignals, (void), ())
WRAP(object, PyObject_Call, (object callable, object arguments, object keywords), (callable, arguments, keywords))
WRAP(object, PyObject_CallNoArgs, (object callable), (callable))
WRAP(object, PyObject_GetAttr, (object value, object name), (value, name))
WRAP(object, PyObject_GetItem, (object value, object key), (value, key))
WRAP(object, PyObject_GetIter, (object value), (value))
WRAP(object, PyIter_Next, (object iterator), (iterator))
WRAP(object, PyObject_Repr, (object value), (value))
WRAP(object, PyObject_Str, (object value), (value))
WRAP(object, PyNumber_Index, (object value), (value))
WRAP(object, PyOS_FSPath, (object value), (value))
WRAP(object, PyImport_Import, (object name), (name))

// The arguments end with NULL. PyO3 passes at most 12.
#define MOST 12
object __real_PyObject_CallMethodObjArgs(object value, object name, ...);
object __wrap_PyObject_CallMethodObjArgs(object value, object name, ...) {
    object a[MOST + 1] = {NULL}, result;
    va_list list;
    va_start(list, name);
    for (int count = 0; (a[count] = va_arg(list, object)) != NULL; count++) {
        if (count == MOST) {
            abort();
        }
    }
    va_end(list);
    pthread_cleanup_push(sleep_forever, NULL);
    result = __real_PyObject_CallMethodObjArgs(value, name, a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], NULL);
    pthread_cleanup_pop(0);
    return result;
}
